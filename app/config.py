"""Settings, read from TUNEYARD_* environment variables. docs/operating.md lists each one."""

import hashlib
import tempfile
from functools import cache
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

DAY_S = 24 * 3600.0


class Settings(BaseSettings):
    """Every setting of every process. Durations are seconds."""

    model_config = SettingsConfigDict(env_prefix="TUNEYARD_", extra="ignore")

    data_dir: Path = Field(default=Path(".tuneyard"), description="Where the embedded service keeps everything it writes.")
    database_url: str = Field(default="", description="SQLAlchemy URL. Default: SQLite in the data directory.")
    broker_url: str = Field(
        default="", description="Redis or Valkey URL. Default: the embedded server's socket in the data directory."
    )
    storage_url: str = Field(
        default="", description="Where files and artifacts lie: a folder or an fsspec URL. Default: in the data directory."
    )
    workspace_dir: Path | None = Field(
        default=None, description="Working folders of running jobs, per node. Default: in the data directory."
    )

    admin_api_key: SecretStr | None = Field(
        default=None, description="API key to create at the first start. Default: one is made and printed."
    )
    signing_key: SecretStr | None = Field(
        default=None,
        description="Ed25519 key that signs manifests: 32 bytes in base64, the same on all hosts. Default: made in the data "
        "directory.",
    )
    secrets_key: SecretStr | None = Field(
        default=None,
        description="Key that encrypts named secrets: 32 bytes in base64, the same on all hosts. Default: made in the data "
        "directory.",
    )
    organization_id: str = Field(default="org-tuneyard", description="The `organization_id` of every job.")
    model_owner: str = Field(
        default="tuneyard", max_length=32, description="The organization part of the names of fine-tuned models."
    )
    model_roots: list[Path] = Field(
        default=[],
        description="Folders below which a job may name a base model by path. Default: `models` in the data directory.",
    )
    data_roots: list[Path] = Field(
        default=[], description="Folders below which a job may name a `file://` data set. Default: none."
    )
    base_models: list[str] = Field(
        default=["openai/gpt-oss-20b", "openai/gpt-oss-120b"],
        description="Base models that GET /v1/models lists; others can be tuned too.",
    )
    max_upload_bytes: int = Field(default=8 * 1024**3, ge=1, description="Largest file an upload may have.")

    requests_per_minute: int = Field(
        default=6000, ge=0, description="Requests that one API key may send in a minute, to all API processes; 0: no limit."
    )
    max_open_streams: int = Field(
        default=500, ge=0, description="Event and log streams that one API key may have open at once, per API process."
    )
    outbound_allowed_hosts: list[str] = Field(
        default=[],
        description="Hosts that webhooks may reach though they are not public: names, addresses or networks such as "
        "`10.0.0.0/8`. Default: none.",
    )

    mlflow_tracking_uri: str = Field(
        default="", description="MLflow server of jobs that name none. Default: none; `databricks` means the workspace's own."
    )
    mlflow_allowed_uris: list[str] = Field(default=[], description="Further MLflow servers that a job may name.")
    mlflow_registry_uri: str = Field(
        default="", description="Where models are registered, such as `databricks-uc`. Default: the job's MLflow server."
    )
    tracking_patience_s: float = Field(
        default=24 * 3600.0, gt=0, description="How long after a job's end a tracker that is away is still tried."
    )

    node_name: str | None = Field(default=None, description="This machine's name among the nodes. Default: its host name.")
    node_address: str = Field(
        default="127.0.0.1", description="The address other nodes reach this one at, for jobs over several nodes."
    )
    network_interface: str = Field(
        default="",
        description="Network interface of jobs over several nodes, as `ib0`. Default: the one that has the node's address.",
    )
    shared_workspace: bool = Field(
        default=False,
        description="Whether the workspace folder is one that all nodes mount: rows and checkpoints are then read there, not "
        "fetched from storage by each node.",
    )
    node_labels: dict[str, str] = Field(
        default={}, description='What jobs may ask of a node by name, as JSON: `{"zone": "b"}`.'
    )
    node_cpu_slots: int = Field(default=1, ge=1, le=1024, description="Jobs that may run at once on a node without GPUs.")

    dequantized_cache_gb: float = Field(
        default=600.0,
        gt=0,
        description="Per node, disk for bfloat16 copies of MXFP4 models; the least used go first. Both gpt-oss take 275.",
    )

    heartbeat_s: float = Field(
        default=2.0, gt=0, description="How often nodes and supervisors report, and so how fast a cancel arrives."
    )
    node_timeout_s: float = Field(default=30.0, gt=0, description="A node silent for longer gets no new jobs.")
    lease_s: float = Field(
        default=120.0, gt=0, description="A job whose supervisor is silent for longer is started again elsewhere."
    )
    join_timeout_s: float = Field(
        default=300.0,
        ge=1,
        description="How long the nodes of a job wait for each other once its rows are read, before it is tried again.",
    )
    max_attempts: int = Field(default=3, ge=1, le=100, description="How often a job is tried when workers are lost.")
    usage_half_life_s: float = Field(
        default=24 * 3600.0, gt=0, description="How fast a project's past use of nodes is forgiven when projects compete."
    )
    reservation_patience_s: float = Field(
        default=3600.0,
        ge=0,
        description="A job first in line for longer has nodes to itself: none passes it there any more.",
    )
    preemption: bool = Field(
        default=False, description="Whether a job of higher priority makes running ones of lower priority save and wait."
    )
    stop_jobs_with_node: bool = Field(
        default=False,
        description="Whether a node worker that stops has its jobs save and stop first: right in a container.",
    )
    stop_grace_s: float = Field(
        default=60.0, gt=0, description="How long a trainer may take to save and stop before it is killed."
    )

    retention_workspaces_s: float = Field(
        default=3 * DAY_S, ge=0, description="Per node: how long the folder of an attempt that ended stays."
    )
    retention_workspaces_gb: float = Field(
        default=500.0, ge=0, description="Per node: the most disk that such folders take; the oldest go first."
    )
    retention_checkpoints_s: float = Field(
        default=30 * DAY_S,
        ge=0,
        description="How long the checkpoints of a job that ended stay, and so from where a failed job can be resumed.",
    )
    retention_checkpoints_gb: float | None = Field(
        default=None, ge=0, description="The most storage that such checkpoints take; the oldest go first. Default: no limit."
    )
    retention_logs_s: float = Field(
        default=90 * DAY_S, ge=0, description="How long the trainer's logs of a job that ended stay."
    )
    retention_events_s: float = Field(
        default=365 * DAY_S,
        ge=0,
        description="How long events and metrics of a job that ended stay; its last state always does.",
    )
    retention_deliveries_s: float = Field(
        default=30 * DAY_S, ge=0, description="How long webhook deliveries that have ended stay listed."
    )
    retention_deleted_s: float = Field(
        default=7 * DAY_S, ge=0, description="How long the files of a deleted model stay in storage."
    )
    retention_orphans_s: float = Field(
        default=7 * DAY_S, ge=0, description="How long bytes stay in storage that no row names, as a crash leaves them."
    )

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.resolve() / 'tuneyard.db'}"

    @property
    def broker_socket(self) -> Path:
        """The embedded Valkey server's Unix socket, in the data directory unless the kernel's limit of 107 bytes forbids it."""
        path = self.data_dir.resolve() / "run" / "valkey.sock"
        if len(str(path).encode()) <= 100:
            return path
        return Path(tempfile.gettempdir()) / f"tuneyard-{hashlib.sha256(str(path).encode()).hexdigest()[:24]}.sock"

    @property
    def resolved_broker_url(self) -> str:
        return self.broker_url or f"redis+socket://{self.broker_socket}"

    @property
    def broker_as_redis(self) -> str:
        """The broker's URL as the Redis client reads it; Celery has a scheme of its own for sockets."""
        return self.resolved_broker_url.replace("redis+socket://", "unix://", 1)

    @property
    def resolved_storage_url(self) -> str:
        return self.storage_url or str(self.data_dir.resolve() / "storage")

    @property
    def resolved_workspace_dir(self) -> Path:
        return (self.workspace_dir or self.data_dir / "workspace").resolve()

    @property
    def dequantized_cache_dir(self) -> Path:
        """Among the workspaces, on the same volume: a bfloat16 copy per MXFP4 model, mapped by every rank of this node."""
        return self.resolved_workspace_dir / "dequantized"

    @property
    def resolved_model_roots(self) -> list[Path]:
        return [root.resolve() for root in self.model_roots or [self.data_dir / "models"]]


@cache
def get_settings() -> Settings:
    """The settings of this process, read once."""
    return Settings()
