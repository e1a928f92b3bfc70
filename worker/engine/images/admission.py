"""Requests that wait for their images.

A message with images comes here before it becomes a request. A thread decodes and processes each image, once for all
that wait for the same; Pillow and numpy let the step loop go on meanwhile. Then the tower makes features, in the loop's
own thread, since it computes on the engine's device: one image between two steps, so that those who are generating wait
for no more than one. With the features of all its images the message has its prompt, and goes the way of any other.

What was made of an image is kept by tenant, cache salt and digest, as blocks of the KV cache are: nobody learns from a
quick answer what others have shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import structlog

from ....shared.errors import PenstockError, UnsupportedParameterError, ValidationError
from ....shared.messages.outcome import RequestError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.images import ImageInput, digest_of
from ....shared.stats.images import ImageStats
from ...models.images.processor import ImageTokens, ProcessedImage
from ...models.images.vision_model import VisionModel
from ...request_checks import check_images_served
from ..structured.threads import CompileThreads, Task
from .cache import ImageCache
from .decode import decode_image
from .expand import check_wholes, expand
from .interface import ReadyMessage

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
    """What the tower has made of an image; ``features [num_placeholders, hidden size]`` on the CPU."""

    tokens: ImageTokens
    features: Any

    @property
    def num_bytes(self) -> int:
        return self.features.numel() * self.features.itemsize


@dataclass
class _Waiting:
    message: EngineCoreRequest
    images: list[ImageInput]
    found: dict[_Key, EncodedImage]


class ImageAdmission:
    """Gives each message with images the tokens and features that stand for them.

    Args:
        max_images: of one message.
        cache_bytes: for processed images and for features, half each.
        busy: entered while the tower computes, which may take long.

    Attributes:
        num_processed, num_encoded: images since the start; those that were found in a cache do not count.
        num_cache_hits: those of messages whose features were found.
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
        # What somebody waits for, whatever the cache has room for.
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
        """Let ``message`` wait for its images; ``take_ready`` gives it back.

        Raises:
            ValidationError: it has too many of them, or asks for what cannot be had with images.
        """
        images = message.images or []
        check_images_served(message, self._max_images, "")
        if message.prompt_embeds is not None:
            raise UnsupportedParameterError("images: a prompt of embeddings has no places for images; send text")
        if message.sampling_params is not None and message.sampling_params.prompt_logprobs is not None:
            raise UnsupportedParameterError("prompt_logprobs needs a prompt without images; leave it at None")
        self._waiting[message.request_id] = _Waiting(message, images, {})

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; what is processed for them goes on and is kept."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)

    def wait(self, timeout_s: float) -> None:
        """Wait until a thread has done something, at most ``timeout_s``; not while the tower has work."""
        if self._tasks and not self._unencoded and not any(task.is_done for task in self._tasks.values()):
            self._threads.wait(timeout_s)

    def take_ready(self) -> list[ReadyMessage]:
        """Messages that wait no longer, in their order, each with its whole prompt or with why it has none."""
        ready: list[ReadyMessage] = []
        may_encode = True
        for request_id, waiting in list(self._waiting.items()):
            try:
                for index, image in enumerate(waiting.images):
                    may_encode = self._advance(waiting, index, image, may_encode) and may_encode
                if any(self._key(waiting, image) not in waiting.found for image in waiting.images):
                    continue
                ready.append(self._complete(waiting))
            except PenstockError as error:
                ready.append(ReadyMessage(waiting.message, (), RequestError(error.code, str(error), error.retryable)))
            except BaseException as error:  # of the tower, or of a library of images, whose panic is no Exception
                log.exception("image_failed", request_id=request_id)
                told = f"images: the model's tower failed: {type(error).__name__}"
                ready.append(ReadyMessage(waiting.message, (), RequestError(FAILED, told, retryable=True)))
            del self._waiting[request_id]
        if not self._waiting:
            # Nobody waits for what aborted requests have left behind.
            self._tasks = {key: task for key, task in self._tasks.items() if not task.is_done}
            self._unencoded.clear()
        return ready

    def stats(self) -> ImageStats:
        """What was computed and is kept."""
        num_bytes = self._processed.num_bytes + self._encoded.num_bytes
        return ImageStats(self.num_cache_hits, self.num_encoded, self.num_processed, num_bytes)

    def forget_processed(self) -> int:
        """Forget processed images; returns how many."""
        return self._processed.clear()

    def forget_encoded(self) -> int:
        """Forget what the tower has made; returns of how many images. Requests under way keep theirs."""
        return self._encoded.clear()

    def _advance(self, waiting: _Waiting, index: int, image: ImageInput, may_encode: bool) -> bool:
        """Bring one image of a message further, if it can be; False if the tower has computed for it."""
        key = self._key(waiting, image)
        if key in waiting.found:
            return True
        encoded = self._encoded.get(key)
        if encoded is not None:
            self.num_cache_hits += 1
            waiting.found[key] = encoded
            return True
        processed = self._process(key, index, image)
        if processed is None or not may_encode:
            return True
        with self._busy():
            features = self._vision.encoder.encode(processed)
        self.num_encoded += 1
        waiting.found[key] = encoded = EncodedImage(processed.tokens, features)
        self._encoded.put(key, encoded)
        del self._unencoded[key]
        return False

    def _process(self, key: _Key, index: int, image: ImageInput) -> ProcessedImage | None:
        """The processed image, once there is one.

        Raises:
            ValidationError: it is not to be had from these bytes.
        """
        known = self._unencoded.get(key) or self._processed.get(key)
        if known is not None:
            self._unencoded[key] = known
            return known
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
            raise ValidationError("its bytes did not come")
        if digest_of(image.data) != image.digest:
            raise ValidationError("its bytes are not those that its digest is of; send it again")
        return self._vision.processor.process(decode_image(image.data))

    def _complete(self, waiting: _Waiting) -> ReadyMessage:
        found = [
            (bytes.fromhex(image.digest), encoded.tokens, encoded.features)
            for image in waiting.images
            for encoded in (waiting.found[self._key(waiting, image)],)
        ]
        message = waiting.message
        processor = self._vision.processor
        token_ids, spans = expand(message.prompt_token_ids or [], processor.image_token_id, found, processor.joiner)
        check_wholes(spans, self._vision.longest_bidirectional)
        whole = msgspec.structs.replace(message, prompt_token_ids=token_ids, images=None)
        return ReadyMessage(whole, spans, None)

    @staticmethod
    def _key(waiting: _Waiting, image: ImageInput) -> _Key:
        return _Key(waiting.message.tenant, waiting.message.cache_salt, image.digest)


def _named(index: int, error: BaseException) -> Exception:
    if isinstance(error, ValidationError):
        return type(error)(f"images[{index}]: {error}")
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
