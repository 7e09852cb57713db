"""The result of a campaign as one HTML page."""

from __future__ import annotations

from pathlib import Path

from attnfuzz.campaign.result import CampaignResult
from attnfuzz.report.files import write_file

__all__ = ["write_html"]


def write_html(result: CampaignResult, path: Path) -> None:
    """Write the page. Raises OSError."""
    write_file(path, b"")
