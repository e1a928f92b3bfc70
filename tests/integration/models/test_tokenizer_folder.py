"""The worker's tokens are those of transformers' AutoTokenizer, whatever files a model's tokenizer is in."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.shared.errors import ModelLoadError
from penstock.worker.models.checkpoint.tokenizer_folder import tokenizer_folder
from penstock.worker.text.tokenizer import TextCodec

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "déjà vu, is it?",
    "日本語のテキスト 🙂",
    "a  b   c\n\td 123",
] * 4
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ cls_token }}<{{ m.role }}> {{ m.content }}{{ sep_token }}{{ eos_token }}"
    "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "the quick fox?"}],
    [{"role": "system", "content": "déjà vu"}, {"role": "user", "content": " a  b "}],
    [{"role": "user", "content": "日本"}, {"role": "assistant", "content": "fox"}, {"role": "user", "content": "🙂\n"}],
]


def byte_level(**options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, **options)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    letters = sorted({letter for text in CORPUS for letter in text if letter.isascii() and letter.isalpha()})
    tokens, merges = ["<unk>", "<s>", "</s>", *bytes_, "▁", *letters], []
    for word in ("the", "quick", "fox", "dog", "over"):
        for end in range(1, len(word) + 1):
            if (merged := "▁" + word[:end]) not in tokens:
                tokens.append(merged)
                merges.append(("▁" + word[: end - 1], word[end - 1]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=names, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    names = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=names, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return tokenizer


def added(content: str, *, special: bool = True) -> dict[str, Any]:
    fields = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, "special": special, **fields}


class Files:
    """A model folder of nothing but a configuration and the files of a tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, model_type: str, tokenizer: Tokenizer | None = None, **config: Any) -> None:
        self.put("config.json", {"model_type": model_type})
        if tokenizer is not None:
            tokenizer.save(str(self.folder / "tokenizer.json"))
        self.put("tokenizer_config.json", {"chat_template": TEMPLATE, **config})

    def put(self, name: str, content: Any) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def put_slow(self, tokenizer: Tokenizer) -> None:
        model = json.loads(tokenizer.to_str())["model"]
        self.put("vocab.json", model["vocab"])
        self.put("merges.txt", "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n")


def llama_with_default_names(files: Files) -> None:
    files.write("llama", sentencepiece_like(), tokenizer_class="LlamaTokenizer")


def llama_fast_with_legacy(files: Files) -> None:
    files.write("llama", sentencepiece_like(), tokenizer_class="LlamaTokenizerFast", legacy=True, add_bos_token=True)


def names_in_special_tokens_map(files: Files) -> None:
    files.write("gpt_neox", byte_level(special_tokens=["<begin>", "<end>"]), tokenizer_class="PreTrainedTokenizerFast")
    files.put("special_tokens_map.json", {"bos_token": added("<begin>"), "eos_token": "<end>", "cls_token": "<begin>"})


def tokens_in_added_tokens_decoder(files: Files) -> None:
    tokens = {"400": added("<user>"), "401": added("<assistant>"), "402": added("fox", special=False)}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<user>", "added_tokens_decoder": tokens}
    files.write("qwen2", byte_level(), **config)


def qwen_class(files: Files) -> None:
    tokens = {"400": added("<|endoftext|>"), "401": added("<|im_start|>"), "402": added("<think>", special=False)}
    files.write(
        "qwen3",
        byte_level(),
        tokenizer_class="Qwen2Tokenizer",
        added_tokens_decoder=tokens,
        eos_token="<|im_start|>",
        bos_token=None,
    )


def name_that_is_no_token(files: Files) -> None:
    files.write(
        "gpt_neox", byte_level(), tokenizer_class="PreTrainedTokenizerFast", bos_token="<new>", sep_token="<new>"
    )


def bert(files: Files) -> None:
    files.write("bert", wordpiece(), tokenizer_class="BertTokenizer", do_lower_case=True)


def unigram_of_no_class(files: Files) -> None:
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    files.write("t5", unigram(), tokenizer_class="PreTrainedTokenizerFast", **names)


def opt_without_tokenizer_json(files: Files) -> None:
    """Write a folder like that of facebook/opt-125m."""
    files.write(
        "opt", tokenizer_class="GPT2Tokenizer", add_bos_token=True, bos_token="</s>", eos_token="</s>", unk_token="</s>"
    )
    files.put_slow(byte_level(special_tokens=["<s>", "<pad>", "</s>", "<unk>"]))


def gpt2_by_its_model_type(files: Files) -> None:
    files.write("gpt2", byte_level(special_tokens=["<|endoftext|>"]), model_max_length=1024)


def byte_level_of_llama_class(files: Files) -> None:
    """Build a tokenizer like DeepSeek's."""
    names = {"bos_token": "<begin>", "eos_token": "<end>"}
    files.write("llama", byte_level(special_tokens=["<begin>", "<end>"]), tokenizer_class="LlamaTokenizerFast", **names)


def cut_and_padded(files: Files) -> None:
    tokenizer = wordpiece()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=32)
    files.write("bert", tokenizer, tokenizer_class="BertTokenizerFast")


CASES: list[Callable[[Files], None]] = [
    llama_with_default_names,
    llama_fast_with_legacy,
    names_in_special_tokens_map,
    tokens_in_added_tokens_decoder,
    qwen_class,
    name_that_is_no_token,
    bert,
    unigram_of_no_class,
    opt_without_tokenizer_json,
    gpt2_by_its_model_type,
    byte_level_of_llama_class,
    cut_and_padded,
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "tokenizers"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    (tmp_path / "model").mkdir()
    return Files(tmp_path / "model")


def texts() -> list[str]:
    draw = random.Random(5)
    parts = [
        *"abz .,?!",
        "the",
        " quick",
        "fox",
        "é",
        "日",
        "🙂",
        "\n",
        "  ",
        "<s>",
        "</s>",
        "<think>",
        "[SEP]",
        "<user>",
        "1",
    ]
    drawn = ["".join(draw.choices(parts, k=draw.randrange(1, 12))) for _ in range(60)]
    return [*CORPUS[:4], "", " ", "▁the", "<|endoftext|>the fox", *drawn]


@pytest.mark.parametrize("write", CASES, ids=[case.__name__ for case in CASES])
def test_tokens_are_those_of_transformers(files: Files, write: Callable[[Files], None]) -> None:
    write(files)
    theirs = transformers.AutoTokenizer.from_pretrained(files.folder)
    ours = TextCodec.load(tokenizer_folder(files.folder, trust_remote_code=False))
    for text in texts():
        for special in (True, False):
            token_ids = theirs(text, add_special_tokens=special, truncation=False, padding=False).input_ids
            assert ours.encode(text, add_special_tokens=special) == token_ids, text
        for skip in (True, False):
            decoded = theirs.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(token_ids, skip_special_tokens=skip) == decoded
    pair = theirs("the fox", "a dog", truncation=False, padding=False).input_ids
    assert ours.encode_pair("the fox", "a dog")[0] == pair
    for chat in CHATS:
        told = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(chat, None) == told


def test_templates_are_those_of_transformers(files: Files) -> None:
    """Each folder has its template in one more place, with precedence over the earlier ones."""
    files.write("gpt_neox", byte_level(), tokenizer_class="PreTrainedTokenizerFast", chat_template="config")
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]

    def check(*expected: str) -> None:
        theirs = transformers.AutoTokenizer.from_pretrained(files.folder)
        ours = TextCodec.load(tokenizer_folder(files.folder, trust_remote_code=False))
        for given, text in zip((None, tools), expected, strict=True):
            assert theirs.apply_chat_template(CHATS[0], tools=given, tokenize=False) == text
            kwargs = {"tools": given} if given else {}
            assert ours.decode(ours.encode_chat(CHATS[0], kwargs), skip_special_tokens=False) == text

    check("config", "config")
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "named for tools"}]
    files.write("gpt_neox", byte_level(), tokenizer_class="PreTrainedTokenizerFast", chat_template=named)
    check("named", "named for tools")
    files.put("chat_template.jinja", "file")
    check("file", "file")
    files.put("additional_chat_templates/tool_use.jinja", "file for tools")
    check("file", "file for tools")


def test_the_template_of_an_older_processor_is_read(files: Files) -> None:
    files.write("gpt_neox", byte_level(), tokenizer_class="PreTrainedTokenizerFast", chat_template="config")
    files.put("chat_template.json", {"chat_template": "processor"})
    for folder in (tokenizer_folder(files.folder, trust_remote_code=False), files.folder):
        codec = TextCodec.load(folder)
        assert codec.decode(codec.encode_chat(CHATS[0], None), skip_special_tokens=False) == "processor"


def test_a_tokenizer_is_converted_once_for_each_content(files: Files, cache: Path) -> None:
    llama_with_default_names(files)
    files.put("generation_config.json", {"temperature": 0.5})
    first = tokenizer_folder(files.folder, trust_remote_code=False)
    assert first.parent == cache
    assert (first / "generation_config.json").is_file(), "clients are told it"
    assert tokenizer_folder(files.folder, trust_remote_code=False) == first
    files.put("special_tokens_map.json", {"bos_token": "</s>"})
    second = tokenizer_folder(files.folder, trust_remote_code=False)
    assert second != first
    assert {path.name for path in cache.iterdir()} == {first.name, second.name}


def test_a_cache_that_cannot_be_written_to_is_done_without(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opt_without_tokenizer_json(files)
    folder = tokenizer_folder(files.folder, trust_remote_code=False)
    assert folder.parent == tmp_path
    assert TextCodec.load(folder).encode("the")


def test_a_tokenizer_json_alone_is_the_whole_tokenizer(files: Files) -> None:
    """Covers a tokenizer with a class that transformers lacks or that needs custom code."""
    llama_with_default_names(files)
    (files.folder / "tokenizer_config.json").unlink()
    assert tokenizer_folder(files.folder, trust_remote_code=False) == files.folder
    code = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    files.put("config.json", {"model_type": "own"})
    files.put("tokenizer_config.json", {"tokenizer_class": "OwnTokenizer", "auto_map": code})
    assert TextCodec.load(tokenizer_folder(files.folder, trust_remote_code=False)).encode("the fox")


@pytest.mark.parametrize(
    ("tokenizer_class", "vocabulary"), [("CTRLTokenizer", "vocab.json"), ("ByT5Tokenizer", "tokenizer_config.json")]
)
def test_a_tokenizer_in_python_is_refused_with_the_remedy(files: Files, tokenizer_class: str, vocabulary: str) -> None:
    files.write("ctrl", tokenizer_class=tokenizer_class)
    if vocabulary == "vocab.json":
        files.put_slow(byte_level())
    with pytest.raises(ModelLoadError, match=r"lacks tokenizer\.json, and none .*; install .*, or make one .*AutoT"):
        tokenizer_folder(files.folder, trust_remote_code=False)
