"""Requests that wait for their images, whose tokens are then inserted into the prompt.

A message with images is processed here before it becomes a request. A thread decodes and processes each image, once for
all messages with the same image; Pillow and numpy release the GIL, so the step loop continues meanwhile. Then the
vision encoder computes features in the loop's thread, because it uses the engine's device: one image between two steps,
so that running requests wait for no more than one. With the features of all its images the message has its prompt, and
continues as any other.

Results are cached by tenant, cache salt and digest, like blocks of the KV cache, so that a client cannot learn from a
quick answer which images others have sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import structlog

from ....shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from ....shared.messages.outcome import RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.images import ImageInput, digest_of
from ....shared.stats import ImageStats
from ...models.images.processor import ImageTokens, ProcessedImage, TokenJoiner
from ...request_checks import check_images_served
from ..scheduling.prompt_inputs import ImageSpan
from ..structured.threads import CompileThreads, Task
from .decode import decode_image
from .interface import ReadyMessage

if TYPE_CHECKING:
    from ...models.images.vision_model import VisionModel


class HasNumBytes(Protocol):
    """A value with a size in bytes."""

    @property
    def num_bytes(self) -> int: ...


Value = TypeVar("Value", bound=HasNumBytes)


class ImageCache(Generic[Value]):
    """Cache that drops the least recently used values. For a single thread.

    Args:
        max_bytes: 0 to cache nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, Value] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> Value | None:
        """Return the value of ``key``; None if it is not cached."""
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Hashable, value: Value) -> None:
        """Cache ``value``, unless it is larger than the whole cache."""
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self.num_bytes -= replaced.num_bytes
        if value.num_bytes > self._max_bytes:
            return
        self._entries[key] = value
        self.num_bytes += value.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.num_bytes -= dropped.num_bytes

    def clear(self) -> int:
        """Drop all entries; return how many there were."""
        num_entries = len(self._entries)
        self._entries.clear()
        self.num_bytes = 0
        return num_entries


FAILED = "image_failed"
PROCESS_TIMEOUT_S = 60.0
NUM_THREADS = 2
MAX_THREADS = 4

log = structlog.get_logger(__name__)


class _Key(NamedTuple):
    tenant: str
    cache_salt: str | None
    digest: str


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """Result of the vision encoder for an image; ``features [num_placeholders, hidden size]`` on the CPU."""

    tokens: ImageTokens
    features: Any

    @property
    def num_bytes(self) -> int:
        return self.features.numel() * self.features.itemsize


@dataclass
class _Waiting:
    message: EngineCoreRequest
    images: list[ImageInput]
    encoded: dict[_Key, EncodedImage]


class ImageAdmission:
    """Adds tokens and features to each message with images.

    Args:
        max_images: limit per message.
        cache_bytes: for processed images and for features, half each.
        busy: context that is entered while the vision encoder computes, which may take long.

    Attributes:
        num_processed, num_encoded: images since the start, without cache hits.
        num_cache_hits: images of messages with cached features.
    """

    def __init__(
        self,
        vision: VisionModel,
        *,
        max_images: int,
        cache_bytes: int,
        busy: Callable[[], AbstractContextManager[Any]] = nullcontext,
        process_timeout_s: float = PROCESS_TIMEOUT_S,
    ) -> None:
        self._vision = vision
        self._max_images = max_images
        self._busy = busy
        self._process_timeout_s = process_timeout_s
        self._threads = CompileThreads(NUM_THREADS, MAX_THREADS, name="images")
        self._processed: ImageCache[ProcessedImage] = ImageCache(cache_bytes // 2)
        self._encoded: ImageCache[EncodedImage] = ImageCache(cache_bytes // 2)
        self._tasks: dict[_Key, Task] = {}
        # Images that messages wait for, whether or not they fit into the cache.
        self._unencoded: dict[_Key, ProcessedImage] = {}
        self._waiting: dict[str, _Waiting] = {}
        self.num_processed = 0
        self.num_encoded = 0
        self.num_cache_hits = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def add(self, message: EngineCoreRequest) -> None:
        """Let ``message`` wait for its images until ``pop_ready`` returns it.

        Raises:
            ValidationError: it has too many images, or parameters that cannot be combined with images.
        """
        images = message.images or []
        check_images_served(message, self._max_images, "")
        if message.prompt_embeds is not None:
            raise UnsupportedParameterError("images: a prompt of embeddings has no places for images; send text")
        if message.sampling_params is not None and message.sampling_params.prompt_logprobs is not None:
            raise UnsupportedParameterError("prompt_logprobs needs a prompt without images; leave it at None")
        self._waiting[message.request_id] = _Waiting(message, images, {})

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests. Images being processed for them are finished and cached."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until a thread has a result; return immediately if the encoder has work."""
        if self._tasks and not self._unencoded and not any(task.is_done for task in self._tasks.values()):
            self._threads.wait(timeout_s)

    def pop_ready(self) -> list[ReadyMessage]:
        """Return the messages that no longer wait, in order, each with its complete prompt or an error."""
        ready: list[ReadyMessage] = []
        may_encode = True
        for request_id, waiting in list(self._waiting.items()):
            try:
                for index, image in enumerate(waiting.images):
                    may_encode = self._advance(waiting, index, image, may_encode) and may_encode
                if any(self._key(waiting, image) not in waiting.encoded for image in waiting.images):
                    continue
                ready.append(self._complete(waiting))
            except PenstockError as error:
                ready.append(ReadyMessage(waiting.message, (), RequestError(error.code, str(error), error.retryable)))
            except BaseException as error:  # a panic of an image library is no Exception
                log.exception("image_failed", request_id=request_id)
                reason = f"images: the model's vision encoder failed: {type(error).__name__}"
                ready.append(ReadyMessage(waiting.message, (), RequestError(FAILED, reason, retryable=True)))
            del self._waiting[request_id]
        if not self._waiting:
            # No message waits, so drop the leftovers of aborted requests.
            self._tasks = {key: task for key, task in self._tasks.items() if not task.is_done}
            self._unencoded.clear()
        return ready

    def stats(self) -> ImageStats:
        """Return counters and cache sizes."""
        num_bytes = self._processed.num_bytes + self._encoded.num_bytes
        return ImageStats(self.num_cache_hits, self.num_encoded, self.num_processed, num_bytes)

    def forget_processed(self) -> int:
        """Clear the cache of processed images; return how many it had."""
        return self._processed.clear()

    def forget_encoded(self) -> int:
        """Clear the cache of features; return how many images it had. Running requests keep theirs."""
        return self._encoded.clear()

    def _advance(self, waiting: _Waiting, index: int, image: ImageInput, may_encode: bool) -> bool:
        """Advance one image of a message, if possible; return False if the vision encoder was used for it."""
        key = self._key(waiting, image)
        if key in waiting.encoded:
            return True
        encoded = self._encoded.get(key)
        if encoded is not None:
            self.num_cache_hits += 1
            waiting.encoded[key] = encoded
            return True
        processed = self._process(key, index, image)
        if processed is None or not may_encode:
            return True
        with self._busy():
            features = self._vision.encoder.encode(processed)
        self.num_encoded += 1
        waiting.encoded[key] = encoded = EncodedImage(processed.tokens, features)
        self._encoded.put(key, encoded)
        del self._unencoded[key]
        return False

    def _process(self, key: _Key, index: int, image: ImageInput) -> ProcessedImage | None:
        """Return the processed image; None while it is being processed.

        Raises:
            ValidationError: these bytes cannot be processed.
        """
        processed = self._unencoded.get(key) or self._processed.get(key)
        if processed is not None:
            self._unencoded[key] = processed
            return processed
        task = self._tasks.get(key)
        if task is None:
            self._tasks[key] = self._threads.submit(lambda _: self._decode_and_process(image))
            return None
        if not task.is_done:
            if task.taken_s > self._process_timeout_s:
                self._threads.give_up(task)
                del self._tasks[key]
                raise ValidationError(
                    f"images[{index}] takes more than {self._process_timeout_s:g} s to process; make it smaller"
                )
            return None
        del self._tasks[key]
        if task.error is not None:
            raise _named(index, task.error)
        self.num_processed += 1
        self._unencoded[key] = task.result
        self._processed.put(key, task.result)
        return task.result

    def _decode_and_process(self, image: ImageInput) -> ProcessedImage:
        if not image.data:
            raise ValidationError("its bytes are missing")
        if digest_of(image.data) != image.digest:
            raise ValidationError("its bytes do not match its digest; send it again")
        return self._vision.processor.process(decode_image(image.data))

    def _complete(self, waiting: _Waiting) -> ReadyMessage:
        images = [
            (bytes.fromhex(image.digest), encoded.tokens, encoded.features)
            for image in waiting.images
            for encoded in (waiting.encoded[self._key(waiting, image)],)
        ]
        message = waiting.message
        processor = self._vision.processor
        token_ids, spans = expand(message.prompt_token_ids or [], processor.image_token_id, images, processor.joiner)
        check_bidirectional(spans, self._vision.longest_bidirectional)
        whole = msgspec.structs.replace(message, prompt_token_ids=token_ids, images=None)
        return ReadyMessage(whole, spans, None)

    @staticmethod
    def _key(waiting: _Waiting, image: ImageInput) -> _Key:
        return _Key(waiting.message.tenant, waiting.message.cache_salt, image.digest)


def _named(index: int, error: BaseException) -> Exception:
    if isinstance(error, ValidationError):
        return type(error)(f"images[{index}]: {error}")
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def expand(
    prompt_token_ids: Sequence[int],
    image_token_id: int,
    images: Sequence[tuple[bytes, ImageTokens, Any]],
    joiner: TokenJoiner,
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Replace the placeholder of each image by the image's tokens.

    Args:
        prompt_token_ids: prompt with one placeholder per image.
        images: key, tokens and features of each image, in the order of the placeholders.
        joiner: joins an image's tokens with the tokens around them.

    Raises:
        ValidationError: the numbers of images and placeholders differ.
    """
    num_places = sum(token_id == image_token_id for token_id in prompt_token_ids)
    if num_places != len(images):
        raise ValidationError(
            f"images: the prompt has {num_places} placeholders (token {image_token_id}) for {len(images)} images; "
            "write the model's placeholder once for each image, or send chat messages"
        )
    token_ids: list[int] = []
    spans: list[ImageSpan] = []
    remaining = iter(images)
    follows_image = False
    for token_id in prompt_token_ids:
        if token_id != image_token_id:
            joiner.append(token_ids, [token_id]) if follows_image else token_ids.append(token_id)
            follows_image = False
            continue
        key, tokens, features = next(remaining)
        start = joiner.append(token_ids, tokens.token_ids)
        places = [start + place for place in tokens.places]
        bidirectional = tuple((start + first, start + stop) for first, stop in tokens.bidirectional)
        spans.append(ImageSpan(start, len(token_ids), places, key, features, tokens.axes, bidirectional))
        follows_image = True
    return token_ids, tuple(spans)


def check_bidirectional(images: Sequence[ImageSpan], longest: int) -> None:
    """Refuse an image with a run of tokens that may not fit into a step.

    Raises:
        ValidationError: more than ``longest`` tokens of an image attend to each other.
    """
    for index, image in enumerate(images):
        if (num_tokens := max((end - first for first, end in image.bidirectional), default=0)) > longest:
            raise ValidationError(
                f"images[{index}]: {num_tokens} of its tokens attend to each other, and this engine computes at most "
                f"{longest} of them in a step; send a smaller image"
            )
