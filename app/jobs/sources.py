"""Where a job's weights and rows come from: file ids, Hub names, paths below roots an operator allowed."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from sqlalchemy import Row
from sqlalchemy.orm import Session

from app.config import get_settings
from app.errors import InvalidRequest, NotFound
from app.files import service as files
from app.jobs.spec import longest_row

MAX_LISTED = 20
MAX_README_CHARACTERS = 65_536
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
HUB_DATASET = re.compile(r"hf://datasets/[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(\?[\w=&.,-]*)?")


def resolve_base_model(model: str) -> str:
    """The Hub id as it is, or the real path of a folder below an allowed root.

    Raises InvalidRequest with code model_not_found or remote_code_not_allowed.
    """
    if not model.startswith(("/", ".", "~", "file:")):
        if HUB_ID.fullmatch(model) and ".." not in model:
            return model
        raise _model_not_found(f"'{model}' is neither a Hub id (OWNER/NAME) nor an absolute path below an allowed root.")
    path = _below(Path(model.removeprefix("file://")), get_settings().resolved_model_roots)
    if path is None or not (path / "config.json").is_file():
        raise _model_not_found("No model folder (with a config.json) of that name lies below a root in TUNEYARD_MODEL_ROOTS.")
    _refuse_remote_code(path)
    return str(path)


def is_folder(base: str) -> bool:
    """Whether a resolved base model is a folder here, not a name on the Hub."""
    return base.startswith("/")


def context_length(base: str) -> int | None:
    """The longest row, in tokens, that a folder's config.json allows, scaled positions counted; None where it does not say."""
    if not is_folder(base):
        return None
    try:
        return longest_row(json.loads((Path(base) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def check_data_source(session: Session, project_id: str, source: str, param: str, *, skips_bad_rows: bool = False) -> None:
    """Raises InvalidRequest unless `source` is a usable file of this project, a Hub data set, or an allowed path.

    A job that skips bad rows may have a file with errors: whether a row is left is known when it is read.
    """
    if source.startswith("file-"):
        _check_file(session, project_id, source, param, skips_bad_rows=skips_bad_rows)
    elif source.startswith("file://"):
        resolve_data_path(source, param)
    elif not HUB_DATASET.fullmatch(source):
        raise InvalidRequest(
            f"'{source}' is no data source: give a file id, hf://datasets/OWNER/NAME?split=train, or file:///PATH.",
            code="invalid_training_file",
            param=param,
        )


def resolve_data_path(source: str, param: str) -> Path:
    """The file behind a `file://` URI below a root in TUNEYARD_DATA_ROOTS; of a folder the subset that `?subset=` names.

    InvalidRequest otherwise.
    """
    parts = urlsplit(source)
    path = _below(Path(unquote(parts.path)), get_settings().data_roots) if parts.netloc in ("", "localhost") else None
    if path is not None and path.is_dir():
        return _subset_file(path, source.partition("?")[0], parts.query, param)
    if path is None or not path.is_file():
        raise InvalidRequest(
            "No file of that name lies below a root in TUNEYARD_DATA_ROOTS: upload it with POST /v1/files instead.",
            code="invalid_training_file",
            param=param,
        )
    return path


def subset_required(source: str, choices: Sequence[str]) -> str:
    """What to say where a data set has several subsets and none was named."""
    listed = ", ".join(choices[:MAX_LISTED])
    return f"{source} has several subsets, {listed}: name one with ?subset=NAME (`subset={choices[0]}`, for instance)."


def _subset_file(folder: Path, source: str, query: str, param: str) -> Path:
    """The file of the named subset of a folder with a README that lists its `configs`, as data sets on the Hub have them."""
    asked = {name: values[0] for name, values in parse_qs(query).items()}.get("subset")
    subsets = _subsets(folder)
    if not subsets:
        message = "The folder has no README.md that lists its subsets (`configs`): name a file in it."
        raise InvalidRequest(message, code="invalid_training_file", param=param)
    if asked is None and len(subsets) > 1:
        raise InvalidRequest(subset_required(source, list(subsets)), code="dataset_subset_required", param=param)
    if asked is not None and asked not in subsets:
        message = f"There is no subset `{asked[:80]}`, only {', '.join(list(subsets)[:MAX_LISTED])}: name one of them."
        raise InvalidRequest(message, code="dataset_subset_required", param=param)
    file = _below(folder / subsets[asked or next(iter(subsets))], [folder])
    if file is None or not file.is_file():
        raise InvalidRequest("The subset's file is not in the folder.", code="invalid_training_file", param=param)
    return file


def _subsets(folder: Path) -> dict[str, str]:
    """Name -> file of every subset that is one file; {} where the README lists none."""
    try:
        with (folder / "README.md").open(encoding="utf-8") as readme:
            head = re.match(r"---\n(.*?)\n---", readme.read(MAX_README_CHARACTERS), re.DOTALL)
        configs = (yaml.safe_load(head[1]) or {}).get("configs") if head else None
        return {str(config["config_name"]): str(config["data_files"]) for config in configs or []}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError, RecursionError):
        return {}


def _check_file(session: Session, project_id: str, file_id: str, param: str, *, skips_bad_rows: bool) -> None:
    try:
        file = files.hold_file(session, project_id, file_id)
    except NotFound as error:
        raise InvalidRequest(f"No such file: {file_id}. Upload it first.", code="invalid_training_file", param=param) from error
    if (reason := why_unusable(file, skips_bad_rows=skips_bad_rows)) is not None:
        raise InvalidRequest(reason, code="invalid_training_file", param=param)


def why_unusable(file: Row[Any], *, skips_bad_rows: bool) -> str | None:
    """Why no job can learn from an upload, as far as it has been read."""
    if file.purpose != "fine-tune":
        return f"File {file.id} has purpose '{file.purpose}': upload it with purpose 'fine-tune'."
    if file.status == "error" and not skips_bad_rows:
        return f"File {file.id} is not valid: {file.status_details} Or set spec.data.on_bad_rows to `skip`."
    return None


def _below(path: Path, roots: list[Path]) -> Path | None:
    """The real path, links followed, where it lies inside one of the roots."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError, ValueError):
        return None
    return real if any(real.is_relative_to(root.resolve()) for root in roots) else None


def _refuse_remote_code(folder: Path) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _model_not_found("The model folder's config.json cannot be read.") from error
    if "auto_map" in config:
        raise InvalidRequest(
            "This model asks for its own Python code, which is never run: use a checkpoint of an architecture in transformers.",
            code="remote_code_not_allowed",
            param="model",
        )


def _model_not_found(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="model_not_found", param="model")
