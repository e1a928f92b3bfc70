"""The demo model's tokenizer: byte-level BPE trained on the demo's own sentences.

Byte-level, so that any prompt a user types is encoded without an unknown token; digits stay single,
so that "spell 407:" shows the model three places. Every number word comes out as one token, which
makes a column of an addition one token too.
"""

from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ...demo.task import TASKS, draw_question

MAX_VOCAB_SIZE = 448  # the merges run out at 382: by then every word is one token
NUM_SENTENCES = 30_000
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2  # the trainer numbers special tokens first, in the order given

# The model is trained on bos + question, one at a time: earlier turns would only be unseen context.
# The rendered text holds bos already, so it is encoded with add_special_tokens=False.
CHAT_TEMPLATE = (
    "{{ bos_token }}{{ (messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | last)"
    " | trim }}"
)


def sentences(seed: int) -> list[str]:
    """Training-side questions with their answers, the tasks in turn."""
    rng = Random(seed)
    drawn = (draw_question(TASKS[i % len(TASKS)], rng, held_out=False) for i in range(NUM_SENTENCES))
    return [f"{question.prompt} {question.answer}" for question in drawn]


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the BPE merges and wrap them with the special tokens and the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[0-9]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )
