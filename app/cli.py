"""The `tuneyard` command."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError
from sqlalchemy.exc import OperationalError

from app import up as embedded
from app.config import get_settings
from app.keys import commands
from app.queue import ANY_NODE, CONTROL, node_queue

cli = typer.Typer(help="Self-hosted fine-tuning behind OpenAI's API.", no_args_is_help=True, add_completion=False)
cli.add_typer(commands.keys, name="keys")
cli.add_typer(commands.projects, name="projects")

_CELERY = ["celery", "-A", "worker.tasks", "worker", "--without-gossip", "--without-mingle", "--loglevel", "INFO"]


@cli.command()
def up(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept. Default: TUNEYARD_DATA_DIR or .tuneyard.")
    ] = None,
) -> None:
    """Serve everything on this machine, in the foreground."""
    try:
        embedded.run(host, port, data_dir or get_settings().data_dir, typer.echo)
    except embedded.CannotStart as error:
        typer.echo(f"tuneyard: {error}", err=True)
        raise typer.Exit(1) from None


@cli.command()
def migrate() -> None:
    """Bring the database to this version's tables, and make the admin key of TUNEYARD_ADMIN_API_KEY."""
    from app import db
    from app import migrate as migrations
    from app.keys import service as keys

    try:
        migrations.upgrade()
    except OperationalError as error:
        typer.echo(f"tuneyard: The database cannot be used: {str(error.orig).strip().splitlines()[0]}", err=True)
        raise typer.Exit(1) from None
    given = get_settings().admin_api_key
    with db.write() as session:
        key = keys.ensure_admin_key(session, given.get_secret_value() if given else None)
    if key is not None and given is None:
        typer.echo(f"Admin API key (printed this once): {key}")


@cli.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="A downloaded result, with its manifest.json.", exists=True, file_okay=False)],
    public_key: Annotated[
        Path | None,
        typer.Option(help="The service's public key, from GET /v1/signing_key. Default: this data directory's own."),
    ] = None,
) -> None:
    """Check a downloaded result offline: the manifest's signature, and every file against it."""
    from app.manifests import check, signing

    try:
        pem = public_key.read_text(encoding="utf-8") if public_key else _own_public_key()
        key = signing.parse_public_key(pem)
    except (OSError, ValueError) as error:
        typer.echo(f"tuneyard: the public key cannot be read: {error}", err=True)
        raise typer.Exit(2) from None
    count, problems = check.check_folder(folder, key)
    for problem in problems:
        typer.echo(f"bad: {problem}")
    if problems:
        raise typer.Exit(1)
    typer.echo(f"good: the signature and all {count} files")


def _own_public_key() -> str:
    """This machine's key. None is made here: one made now could not have signed anything."""
    from app.manifests import signing

    settings = get_settings()
    if settings.signing_key is None and not signing.key_path().exists():
        raise ValueError("there is no service here: save the answer of GET /v1/signing_key and name it with --public-key")
    return signing.public_key_pem()


@cli.command()
def control() -> None:
    """Run a control worker: placement, and the tick that finds what was lost. Any number may run."""
    _exec([*_CELERY, "-n", "control@%h", "-Q", CONTROL, "--pool", "threads", "--concurrency", "2"])


@cli.command()
def node() -> None:
    """Run this machine's node worker. One per machine; restarting it does not touch running jobs."""
    import socket

    name = get_settings().node_name or socket.gethostname()
    _exec([*_CELERY, "-n", f"node@{name}", "-Q", f"{node_queue(name)},{ANY_NODE}", "--pool", "threads", "--concurrency", "4"])


def main() -> None:
    """The entry point: a setting that cannot be read is one line, not a traceback."""
    try:
        get_settings()
    except (SettingsError, ValidationError) as error:
        typer.echo(
            f"tuneyard: A TUNEYARD_ setting cannot be read (lists are JSON, as '[\"/models\"]'): {_first_line(error)}", err=True
        )
        raise SystemExit(1) from None
    cli()


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _exec(command: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", *command])


if __name__ == "__main__":
    main()
