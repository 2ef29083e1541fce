"""Turns one GGUF file into a bf16 safetensors directory. A program of its own: only here does torch run.

Started by `splitserve.models.gguf` as `python -P -m splitserve.models.convert FILE DIRECTORY`; it ends when its
standard input closes, so that it never outlives its caller. Speaks JSON lines on standard output:
`{"stage", "done", "total"}` while it works, `{"refused": reason}` when the file cannot be served. Exit status 0: done,
`REFUSED`: refused, anything else: a failure explained on standard error.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from splitserve.models.gguf import REFUSED
from splitserve.models.gguf_tokenizers import GGUFTokenizerInfo, restore_stages, stages_for

_NUM_STEPS = 4


def main(source: Path, directory: Path) -> int:
    """Converts `source` into the existing, empty `directory`. Returns the exit status."""
    threading.Thread(target=_end_with_caller, daemon=True).start()
    try:
        convert(source, directory)
    except ValueError as error:
        _say(refused=str(error))
        return REFUSED
    return 0


def convert(source: Path, directory: Path) -> None:
    """Writes config, generation config, tokenizer and bf16 weights of `source` into `directory`.

    Raises ValueError for a file that cannot be served as it should be.
    """
    _step("reading the file", 0)
    reader = GGUFReader(source)
    info = tokenizer_info(reader)
    stages_for(info)  # refuses before the long part
    _step("converting the tokenizer", 1)
    _convert_tokenizer(source, directory, reader, info)
    _step("dequantizing the weights", 2)
    _convert_weights(source, directory, reader)
    _step("finished", _NUM_STEPS)


def tokenizer_info(reader: GGUFReader) -> GGUFTokenizerInfo:
    """What the file says about its tokenizer. Raises ValueError when it carries none."""
    kind = _field(reader, "tokenizer.ggml.model")
    if kind is None:
        raise ValueError("the file carries no tokenizer (tokenizer.ggml.model)")
    return GGUFTokenizerInfo(
        kind=kind,
        pre=_field(reader, "tokenizer.ggml.pre"),
        adds_bos=_field(reader, "tokenizer.ggml.add_bos_token"),
        adds_eos=_field(reader, "tokenizer.ggml.add_eos_token"),
        adds_space=_field(reader, "tokenizer.ggml.add_space_prefix"),
        bos_token=_token(reader, _field(reader, "tokenizer.ggml.bos_token_id")),
        eos_token=_token(reader, _field(reader, "tokenizer.ggml.eos_token_id")),
    )


def _convert_tokenizer(source: Path, directory: Path, reader: GGUFReader, info: GGUFTokenizerInfo) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    restore_stages(tokenizer.backend_tokenizer, info)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    context_length = _field(reader, f"{_field(reader, 'general.architecture')}.context_length")
    if context_length is not None:
        tokenizer.model_max_length = int(context_length)
    if template := _field(reader, "tokenizer.chat_template"):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    # The class that saves may rebuild the last stage from its own settings: what was restored is what is written.
    tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    _drop_foreign_tokens(directory, len(reader.get_field("tokenizer.ggml.tokens").data))


def _drop_foreign_tokens(directory: Path, num_tokens: int) -> None:
    """Takes out tokens that the conversion made up: the class it goes through has special tokens of its own.

    Their ids lie behind the vocabulary, where the model has no row: text that spells one would break the forward.
    """
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    foreign = {token["content"] for token in content["added_tokens"] if token["id"] >= num_tokens}
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < num_tokens]
    _write_json(directory / "tokenizer.json", content)
    config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if not (isinstance(value, str) and value in foreign)}
    _write_json(directory / "tokenizer_config.json", kept)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _convert_weights(source: Path, directory: Path, reader: GGUFReader) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    for name, token_id in _special_ids(reader).items():
        setattr(model.config, name, token_id)
        setattr(model.generation_config, name, token_id)
    if eos_ids := _end_of_generation_ids(reader):
        model.generation_config.eos_token_id = eos_ids if len(eos_ids) > 1 else eos_ids[0]
    model.generation_config._from_model_config = False  # it says more than the model config does
    _step("writing the weights", 3)
    model.save_pretrained(directory)


def _special_ids(reader: GGUFReader) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: _field(reader, f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: int(token_id) for name, token_id in found.items() if token_id is not None}


def _end_of_generation_ids(reader: GGUFReader) -> list[int]:
    found = (_field(reader, f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return list(dict.fromkeys(int(token_id) for token_id in found if token_id is not None))


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _token(reader: GGUFReader, token_id: int | None) -> str | None:
    """One entry of the vocabulary, without decoding all of it."""
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if token_id is None or tokens is None or not 0 <= token_id < len(tokens.data):
        return None
    return bytes(tokens.parts[tokens.data[token_id]]).decode("utf-8")


def _step(stage: str, done: int) -> None:
    _say(stage=stage, done=done, total=_NUM_STEPS)


def _say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _end_with_caller() -> None:
    # Not through sys.stdin: its lock would be held by this thread when the interpreter ends.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
