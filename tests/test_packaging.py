"""What ships around the code agrees with it: Compose, Dockerfile, pins, documented settings, hooks."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import Settings

ROOT = Path(__file__).parents[1]
SETTINGS = {f"TUNEYARD_{name.upper()}" for name in Settings.model_fields}
SECRETS = ("PASSWORD", "API_KEY", "TOKEN", "SECRET")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load(read("docker-compose.yml"))["services"]
    return services


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))


def test_compose_has_the_services_of_the_design(services: dict[str, dict[str, Any]]) -> None:
    assert set(services) == {"postgres", "valkey", "migrate", "api", "control", "worker"}


def test_compose_has_no_default_for_a_secret() -> None:
    variables = re.findall(r"(?<!\$)\$\{(\w+)([^}]*)\}", read("docker-compose.yml"))
    secrets = [(name, rest) for name, rest in variables if name.endswith(SECRETS)]
    assert secrets
    assert [name for name, rest in secrets if not rest.startswith(":?set ")] == []


def test_no_secret_is_written_in_the_example_environment() -> None:
    lines = [line.lstrip("#") for line in read(".env.example").splitlines() if "=" in line]
    assert [line for line in lines if line.split("=")[0].endswith(SECRETS) and line.split("=")[1]] == []


def test_every_service_proves_its_health_or_runs_once(services: dict[str, dict[str, Any]]) -> None:
    assert [name for name, service in services.items() if "healthcheck" not in service] == ["migrate"]


def test_every_service_waits_for_what_it_needs(services: dict[str, dict[str, Any]]) -> None:
    needs = {name: service["depends_on"] for name, service in services.items() if "depends_on" in service}
    assert needs["migrate"] == {"postgres": {"condition": "service_healthy"}}
    for name in ("api", "control", "worker"):
        assert needs[name]["migrate"] == {"condition": "service_completed_successfully"}
        assert needs[name]["valkey"] == {"condition": "service_healthy"}


def test_every_process_of_ours_has_an_init_that_reaps(services: dict[str, dict[str, Any]]) -> None:
    assert all(service["init"] for service in services.values() if service["image"].startswith("tuneyard-"))
    assert 'ENTRYPOINT ["tini"' in read("Dockerfile")


def test_images_are_built_from_targets_of_the_dockerfile(services: dict[str, dict[str, Any]]) -> None:
    targets = re.findall(r"^FROM \S+ AS (\w+)$", read("Dockerfile"), re.MULTILINE)
    built = {service["image"]: service["build"]["target"] for service in services.values() if "build" in service}
    assert set(built.values()) <= set(targets)
    used = {service["image"] for service in services.values() if service["image"].startswith("tuneyard-")}
    assert used == set(built)


def test_images_run_as_a_user_without_rights() -> None:
    stages = read("Dockerfile").split("\nFROM ")
    assert all("\nUSER tuneyard\n" in stage for stage in stages if re.match(r"base AS (api|worker)\n", stage))


def test_the_api_image_holds_no_torch() -> None:
    api = re.split(r"^FROM base AS worker$", read("Dockerfile"), flags=re.MULTILINE)[0]
    assert "pip install" in api
    assert "torch==" not in api
    assert "[worker]" not in api


@pytest.mark.parametrize(
    "name", ["docker-compose.yml", "Dockerfile", ".env.example", "README.md", "docs/operating.md", "docs/api.md"]
)
def test_every_setting_that_is_named_exists(name: str) -> None:
    assert set(re.findall(r"TUNEYARD_[A-Z0-9_]*[A-Z0-9]", read(name))) - SETTINGS == set()


def test_every_setting_is_in_the_operating_guide() -> None:
    documented = dict(re.findall(r"^\| `(TUNEYARD_\w+)` \| .* \| .* \| (.*) \|$", read("docs/operating.md"), re.MULTILINE))
    assert documented == {f"TUNEYARD_{name.upper()}": field.description for name, field in Settings.model_fields.items()}


def test_every_package_is_pinned(project: dict[str, Any]) -> None:
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    wanted = {canonical(re.split(r"[\[<>=]", requirement)[0]) for group in groups for requirement in group}
    pins = [line.split("==") for line in read("constraints.txt").splitlines()]
    assert all(len(pin) == 2 for pin in pins)
    assert wanted - {canonical(name) for name, _ in pins} == set()


def test_the_hooks_run_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    assert recipe is not None
    made = [line.removeprefix("@$(BIN)/").removesuffix(" .") for line in recipe.group(1).replace("\t", "").splitlines()]
    (repo,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    hooked = [hook["entry"].removeprefix(".venv/bin/").replace(" --force-exclude", "") for hook in repo["hooks"]]
    assert hooked == made


def test_make_help_lists_every_target() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    phony = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    assert phony is not None
    assert re.findall(r"make ([a-z-]+) ", listed) == phony.group(1).split()


def test_make_says_in_one_line_that_python_is_too_old(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)  # there is no environment to spoil there
    # Quiet about folders: the tests themselves may run below a make, whose children name theirs.
    make = ["make", "--no-print-directory", "PYTHON=false", ".venv/.base-stamp"]
    made = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert made.stdout.count("\n") == 1
    assert "Python 3.11 or 3.12" in made.stdout


def test_no_file_names_a_registry() -> None:
    """Where packages come from is the user's configuration."""
    words = (("pypi", "org"), ("pythonhosted", "org"), ("pytorch", "org"), ("npmjs", "org"), ("docker", "io"), ("ghcr", "io"))
    hosts = [".".join(parts) for parts in words]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = {name: (ROOT / name).read_text(encoding="utf-8", errors="replace") for name in listed.split("\0") if name}
    assert [(name, host) for name, text in texts.items() for host in hosts if host in text] == []


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
