"""`tuneyard keys` and `tuneyard projects`: for an operator at the service's own machine, straight on its database."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError

from app import db
from app.audit import service as audit
from app.errors import TuneyardError
from app.keys import service
from app.keys.schemas import KeyCreate, KeyOut, KeyRotate, ProjectCreate, ProjectOut, ProjectUpdate

keys = typer.Typer(help="API keys.", no_args_is_help=True)
projects = typer.Typer(help="Projects and their quotas.", no_args_is_help=True)

Project = Annotated[str, typer.Option("--project", help="Id of the project.")]
KeyId = Annotated[str, typer.Argument(help="Id of the key, as `tuneyard keys list` shows it.")]
Weight = Annotated[float | None, typer.Option(help="Its part of the nodes where projects compete.")]
MaxRunningJobs = Annotated[int | None, typer.Option(help="More jobs wait.")]
MaxGpus = Annotated[int | None, typer.Option(help="At once; jobs beyond it wait.")]
MaxGpuHours = Annotated[float | None, typer.Option("--max-gpu-hours-per-month", help="More jobs are refused.")]
MaxStorage = Annotated[int | None, typer.Option("--max-storage-bytes", help="Files and results.")]


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="For people.")],
    project: Project = service.DEFAULT_PROJECT_ID,
    scope: Annotated[list[str] | None, typer.Option(help="What it opens; may be repeated. Default: all but `admin`.")] = None,
    expires_in_days: Annotated[float | None, typer.Option(help="Default: never.")] = None,
) -> None:
    """Make a key, and print it this once."""
    with _in_words():
        given = {"scopes": scope} if scope else {}
        body = KeyCreate(name=name, expires_in_s=expires_in_days and expires_in_days * 86400, **given)
        with db.write() as session:
            key = service.create_key(session, project, body.name, scopes=body.scopes, lifetime_s=body.expires_in_s)
            audit.record_command(session, "create_api_key", key.row.id)
        typer.echo(key.plaintext)


@keys.command("list")
def list_keys(project: Project = service.DEFAULT_PROJECT_ID) -> None:
    """One JSON object a line, the newest 100 first."""
    with _in_words(), db.read() as connection:
        for row in service.list_keys(connection, project)[0]:
            typer.echo(KeyOut.of(row).model_dump_json())


@keys.command("rotate")
def rotate_key(
    key_id: KeyId,
    project: Project = service.DEFAULT_PROJECT_ID,
    keep_old_s: Annotated[float, typer.Option(help="Seconds for which the old one still opens.")] = 0.0,
) -> None:
    """Replace a key by another with the same scopes, and print that this once."""
    with _in_words(), db.write() as session:
        keep = KeyRotate(keep_old_s=keep_old_s).keep_old_s
        key = service.rotate_key(session, project, key_id, keep_old_s=keep)
        audit.record_command(session, "rotate_api_key", key_id)
    typer.echo(key.plaintext)


@keys.command("revoke")
def revoke_key(key_id: KeyId, project: Project = service.DEFAULT_PROJECT_ID) -> None:
    """From now on the key opens nothing."""
    with _in_words(), db.write() as session:
        service.revoke_key(session, project, key_id)
        audit.record_command(session, "delete_api_key", key_id)


@projects.command("create")
def create_project(name: Annotated[str, typer.Argument(help="One of its own among all projects.")]) -> None:
    """Make a project, and print its id."""
    with _in_words(), db.write() as session:
        project = service.create_project(session, ProjectCreate(name=name).name)
        audit.record_command(session, "create_project", project.id)
    typer.echo(project.id)


@projects.command("list")
def list_projects() -> None:
    """One JSON object a line, the newest 100 first."""
    with _in_words(), db.read() as connection:
        for row in service.list_projects(connection)[0]:
            typer.echo(ProjectOut.of(row).model_dump_json())


@projects.command("set")
def set_quotas(
    project: Annotated[str, typer.Argument(help="Id of the project.")],
    weight: Weight = None,
    max_running_jobs: MaxRunningJobs = None,
    max_gpus: MaxGpus = None,
    max_gpu_hours: MaxGpuHours = None,
    max_storage: MaxStorage = None,
) -> None:
    """Set what is given. The API's PATCH also lifts a quota."""
    given = {
        "weight": weight,
        "max_running_jobs": max_running_jobs,
        "max_gpus": max_gpus,
        "max_gpu_hours_per_month": max_gpu_hours,
        "max_storage_bytes": max_storage,
    }
    with _in_words(), db.write() as session:
        body = ProjectUpdate.model_validate({name: value for name, value in given.items() if value is not None})
        service.update_project(session, project, body.model_dump(exclude_unset=True))
        audit.record_command(session, "update_project", project)


@contextmanager
def _in_words() -> Iterator[None]:
    """What is refused is one line, not a traceback."""
    try:
        yield
    except TuneyardError as error:
        reason = error.message
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
    except OperationalError as error:
        reason = f"The database cannot be used: {str(error.orig).strip().splitlines()[0]}"
    else:
        return
    typer.echo(f"tuneyard: {reason}", err=True)
    raise typer.Exit(1)
