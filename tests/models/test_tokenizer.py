"""Encoding: ids are made once and rightly, and bad input is refused with the field that holds it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from splitserve.models.description import ModelDescription
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.errors import InvalidRequest
from tests.tiny_models import add_tokenizer

USER = [{"role": "user", "content": "abc the 123"}]


def _variant(model: ModelDescription, folder: Path, **tokenizer_config: object) -> Path:
    """A copy of the tiny model's tokenizer files with some settings changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model.directory / name, folder / name)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **tokenizer_config}))
    return folder


def test_a_second_bos_comes_before_the_chat_templates_own(tiny_model: ModelDescription, tmp_path: Path) -> None:
    """C12: the tokenizer adds BOS to plain text; the template has written it already."""
    tokenizer = Tokenizer.load(_with_bos_added(_variant(tiny_model, tmp_path)))
    assert tokenizer.encode("abc").count(1) == 1
    chat = tokenizer.encode_chat(USER)
    assert chat[0] == 1
    assert chat.count(1) == 1


CONVERSATIONS = [
    USER,
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 👩\u200d👧 \n\n  12 "}],
    [
        {"role": "user", "content": "the <bos> <eos> <|im_end|>"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": " abc"},
    ],
]


def _with_bos_added(directory: Path) -> Path:
    """Its tokenizer puts BOS before a plain text, as many do."""
    name = json.loads((directory / "tokenizer_config.json").read_text())["bos_token"]
    library = LibraryTokenizer.from_file(str(directory / "tokenizer.json"))
    token_id = library.token_to_id(name)
    library.post_processor = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, token_id)])
    library.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("kind", ["template with BOS", "ChatML"])
def test_chat_ids_differ_from_transformers(
    kind: str, adds_bos: bool, tiny_model: ModelDescription, tmp_path: Path
) -> None:
    """C12: as `apply_chat_template` tokenizes."""
    if kind == "ChatML":
        add_tokenizer(tmp_path)
    else:
        _variant(tiny_model, tmp_path)
    if adds_bos:
        _with_bos_added(tmp_path)
    _require_transformers_ids(tmp_path)


def test_chat_ids_of_the_default_model_differ_from_transformers(default_model: ModelDescription) -> None:
    _require_transformers_ids(default_model.directory)


def _require_transformers_ids(directory: Path) -> None:
    ours, theirs = Tokenizer.load(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
        assert ours.encode_chat(messages) == expected
        text = messages[-1]["content"]
        assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("settings", "ends"), [({"add_bos_token": True}, (1, None)), ({"add_eos_token": True}, (None, 2))]
)
def test_the_tokenizer_configuration_is_not_heard(
    settings: dict[str, bool], ends: tuple[int | None, int | None], tiny_model: ModelDescription, tmp_path: Path
) -> None:
    plain = Tokenizer.load(tiny_model.directory).encode("abc the")
    ids = Tokenizer.load(_variant(tiny_model, tmp_path, **settings)).encode("abc the")
    assert ids == [token_id for token_id in (ends[0], *plain, ends[1]) if token_id is not None]


def test_a_long_prompt_is_cut_without_a_word(tiny_model: ModelDescription, tmp_path: Path) -> None:
    directory = _variant(tiny_model, tmp_path)
    library = LibraryTokenizer.from_file(str(directory / "tokenizer.json"))
    library.enable_truncation(max_length=4)
    library.enable_padding(length=8)
    library.save(str(directory / "tokenizer.json"))
    assert len(Tokenizer.load(directory).encode("z" * 100)) == 100
    assert len(Tokenizer.load(directory).encode("z")) == 1


def test_a_lone_surrogate_crashes_the_encoder(tiny_model: ModelDescription) -> None:
    tokenizer = Tokenizer.load(tiny_model.directory)
    with pytest.raises(InvalidRequest, match=r"U\+D83D") as refused:
        tokenizer.encode("a\ud83d")
    assert refused.value.field == "text"
    with pytest.raises(InvalidRequest, match=r"U\+DC00") as refused:
        tokenizer.encode_chat([{"role": "user", "content": "\udc00"}])
    assert refused.value.field == "messages"


def test_control_characters_crash_or_vanish(tiny_model: ModelDescription) -> None:
    tokenizer = Tokenizer.load(tiny_model.directory)
    text = "".join(map(chr, range(0x100)))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"role": "foo", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": ["x"]}],
    ],
    ids=["empty", "no object", "role", "null", "no content", "no role", "parts"],
)
def test_bad_messages_reach_the_template(messages: list[dict[str, str]], tiny_model: ModelDescription) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Tokenizer.load(tiny_model.directory).encode_chat(messages)
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}", "{% for %}", "{{ 1 / 0 }}"],
)
def test_a_failing_template_is_our_fault(template: str, tiny_model: ModelDescription, tmp_path: Path) -> None:
    directory = _variant(tiny_model, tmp_path)
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidRequest, match="chat template") as refused:
        Tokenizer.load(directory).encode_chat(USER)
    assert refused.value.field == "messages"


def test_a_template_in_the_configuration_is_overlooked(tiny_model: ModelDescription, tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    for value in ("{{ eos_token }}", templates):
        directory = _variant(tiny_model, tmp_path, chat_template=value)
        (directory / "chat_template.jinja").unlink()
        assert Tokenizer.load(directory).encode_chat(USER) == [2]


def test_a_model_without_template_answers_nonsense(tiny_model: ModelDescription, tmp_path: Path) -> None:
    directory = _variant(tiny_model, tmp_path)
    (directory / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest) as refused:
        tokenizer.encode_chat(USER)
    assert refused.value.reason == "NO_CHAT_TEMPLATE"


def test_a_missing_or_broken_tokenizer_gives_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidRequest, match="cannot be used"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**63])
def test_an_impossible_id_overflows(token_id: int, tiny_model: ModelDescription) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Tokenizer.load(tiny_model.directory).decode([token_id])
    assert refused.value.field == "token_ids"


def test_the_router_imports_torch(tiny_model: ModelDescription) -> None:
    program = f"""
import sys
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
model = locate_model({str(tiny_model.directory)!r})
tokenizer = Tokenizer.load(model.directory)
stream = tokenizer.decode_stream()
ids = tokenizer.encode("abc 123") + tokenizer.encode_chat([{{"role": "user", "content": "x"}}])
text = [stream.step(token_id) for token_id in ids], stream.flush(), tokenizer.decode(ids)
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
