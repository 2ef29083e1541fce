"""Models from a Hugging Face repository, through the hub's own cache (`HF_HOME`) and settings. Never imports torch.

Called by `splitserve.models.locate`. Only files of the repository's top folder are fetched: safetensors weights,
configuration and tokenizer; code and pickled weights only when asked for.
"""

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitserve.models.progress import Progress, report
from splitserve.service.errors import InvalidRequest, NotFound, Unavailable

_REPOSITORY_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
_SETTINGS = ("*.json", "*.jinja", "tokenizer.model")
_WANTED = (*_SETTINGS, "*.safetensors")
# Other folders hold other formats of the same weights, and `consolidated` is a second copy of them.
_UNWANTED = ("*/*", "consolidated*")


@dataclass(frozen=True)
class Snapshot:
    """A repository's files at one commit."""

    directory: Path
    commit: str


def is_repository_id(model: str) -> bool:
    """Whether `model` is spelled like `owner/name` (or a bare name), so that asking the hub makes sense."""
    return _REPOSITORY_ID.fullmatch(model) is not None and ".." not in model and len(model) <= 96


def fetch_repository(
    repository: str,
    revision: str | None,
    progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Snapshot:
    """The repository's files at `revision` (None: its default branch), fetched now unless they are in the hub's cache.

    Raises `NotFound` for an unknown or closed repository or revision, `Unavailable` when the hub cannot be reached and
    the cache does not hold it, `InvalidRequest` when it has no safetensors weights.
    """
    wanted = [*_WANTED, "*.py"] if trust_remote_code else list(_WANTED)
    directory = _download(repository, revision, wanted, progress)
    if not any(directory.glob("*.safetensors")):
        if not allow_pickle:
            raise InvalidRequest(
                f"{repository} has no *.safetensors weights; pickled ones can run code when loaded: "
                "--allow-pickle allows them",
                reason="PICKLE_REFUSED",
                field="model",
            )
        directory = _download(repository, revision, [*wanted, "*.bin"], progress)
    return Snapshot(directory, directory.name)


def fetch_settings(repository: str, revision: str | None, progress: Progress | None = None) -> Snapshot:
    """Configuration and tokenizer alone, whatever the weights are. Raises as `fetch_repository`."""
    directory = _download(repository, revision, list(_SETTINGS), progress)
    return Snapshot(directory, directory.name)


def _download(repository: str, revision: str | None, wanted: list[str], progress: Progress | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    named = f"{repository} at revision {revision}" if revision else repository
    try:
        path = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=wanted,
            ignore_patterns=list(_UNWANTED),
            tqdm_class=_reporting_bar(progress),
        )
    except errors.GatedRepoError as error:
        raise NotFound(f"{named} is open only to accounts it was granted to: {error}", field="model") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise NotFound(f"the model hub has no {named}: {error}", field="model") from error
    except errors.HFValidationError as error:
        raise InvalidRequest(f"{repository} is not a repository id: {error}", field="model") from error
    except Exception as error:  # the HTTP library beneath is not the same in all versions: nothing narrower to name
        raise Unavailable(f"{named} is not in the cache and the model hub gave no answer: {error}") from error
    return Path(path)


def _reporting_bar(progress: Progress | None) -> Any:
    """The hub draws progress with a tqdm class: this one draws nothing and passes byte counts on."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    furthest = 0

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> Any:
            nonlocal furthest
            drawn = super().update(n)
            # Some versions draw two bars over the same bytes, one of the network and one of the disk.
            if self.unit == "B" and self.n > furthest:
                furthest = int(self.n)
                report(progress, "downloading the model", furthest, int(self.total or 0))
            return drawn

    return ReportingBar
