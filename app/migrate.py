"""Database migrations, run from code: `tuneyard migrate`, `up` and the tests all come through here."""

from pathlib import Path

from alembic import command
from alembic.config import Config

from app.config import get_settings

SCRIPTS = Path(__file__).resolve().parent.parent / "migrations"


def upgrade(url: str | None = None, revision: str = "head") -> None:
    """Bring a database to a revision; nothing happens where it is there already."""
    command.upgrade(config(url), revision)


def downgrade(url: str | None = None, revision: str = "base") -> None:
    """Take a database back to a revision; `base` leaves nothing of ours."""
    command.downgrade(config(url), revision)


def config(url: str | None = None) -> Config:
    """Alembic's configuration for a database; default: the one of the settings."""
    settings = Config()
    settings.set_main_option("script_location", str(SCRIPTS))
    settings.attributes["url"] = url or get_settings().resolved_database_url
    return settings
