"""From what a user typed after `--model` to a directory on this machine.

Called by router, workers and command line at start; may take minutes the first time (download, conversion), blocks, and
never imports torch. Several processes asking for the same model at once fetch and convert it once.
"""

from pathlib import Path

from splitserve.models.cache import cache_root
from splitserve.models.default_model import DEFAULT_MODEL, default_directory
from splitserve.models.description import ModelDescription, describe
from splitserve.models.directory import check_directory, content_digest
from splitserve.models.gguf import convert_gguf, read_manifest
from splitserve.models.hub import fetch_repository, fetch_settings, is_repository_id
from splitserve.models.progress import Progress
from splitserve.service.errors import InvalidRequest, NotFound


def locate_model(
    model: str | None,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    loads_weights: bool = True,
) -> ModelDescription:
    """Finds, fetches or converts a model and describes it.

    `model` is None for the default, a directory, a `.gguf` file or a Hugging Face repository id. `revision` (branch,
    tag or commit) is for repositories only. Without `loads_weights` the caller will read configuration and tokenizer
    alone: nothing has to be trusted for that, and a repository's weights are not fetched. Raises `InvalidRequest` for
    what cannot be served, `NotFound` for what does not exist, `Unavailable` where a network is needed and not there.
    """
    if revision is not None and not _may_be_repository(model):
        raise InvalidRequest(f"--revision {revision} is for repositories: {model or 'the default model'} is none")
    cache = cache_root(cache_dir)
    if model is None or model == DEFAULT_MODEL:
        return _described(default_directory(cache, progress))
    path = Path(model).expanduser()
    if path.is_dir():
        if loads_weights:
            check_directory(path, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        return _described(path.resolve())
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise NotFound(f"there is no file {model}", field="model")
        return _described(convert_gguf(path.resolve(), cache, progress))
    if path.is_file():
        raise InvalidRequest(f"{model} is neither a directory nor a .gguf file", field="model")
    if not is_repository_id(model):
        raise NotFound(f"there is no directory {model}, and it is not a repository id (owner/name)", field="model")
    if not loads_weights:
        settings = fetch_settings(model, revision, progress)
        return describe(settings.directory, model, settings.commit)
    snapshot = fetch_repository(
        model, revision, progress, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle
    )
    check_directory(snapshot.directory, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    return describe(snapshot.directory, model, snapshot.commit)


def _may_be_repository(model: str | None) -> bool:
    return model is not None and model != DEFAULT_MODEL and is_repository_id(model) and not Path(model).exists()


def _described(directory: Path) -> ModelDescription:
    manifest = read_manifest(directory)
    if manifest is not None:
        return describe(directory, manifest.name, manifest.revision)
    return describe(directory, directory.name, content_digest(directory))
