"""/v1/files: the input and output files of batches."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from ....shared.values.shown import shown
from ...batches.batch_records import MAX_FILE_BYTES, PURPOSES, Deleted, FileObject, Page
from ...batches.files import MAX_LIMIT, Upload, check_upload
from ...openai.errors import OpenAIError, bad_field
from ..http import gateway_of, json_response
from ..idempotency import reserve
from ..multipart import FormPart, FormReader
from ..operations import Operation
from ..reservations import digest_of

# Limit of a form's size without its file.
MAX_FORM_BYTES = 1024 * 1024
_SECONDS, _ANCHOR = "expires_after[seconds]", "expires_after[anchor]"


class FileUpload(msgspec.Struct, kw_only=True):
    """The form of an upload. ``expires_after`` is sent as the field ``expires_after[seconds]``."""

    file: bytes
    purpose: str


class _Form(msgspec.Struct):
    """The parts of a form received so far."""

    fields: dict[str, str] = {}
    upload: Upload | None = None
    filename: str = ""

    @property
    def purpose(self) -> str:
        purpose = self.fields.get("purpose")
        if purpose is None:
            raise bad_field("purpose", "purpose must be given", code="missing_required_parameter")
        return purpose

    @property
    def expires_after_s(self) -> int | None:
        seconds, anchor = self.fields.get(_SECONDS), self.fields.get(_ANCHOR, "created_at")
        if anchor != "created_at":
            raise bad_field("expires_after.anchor", f"expires_after.anchor must be 'created_at', got {shown(anchor)}")
        if seconds is None:
            return None
        try:
            return int(seconds)
        except ValueError:
            message = f"expires_after.seconds must be a number, got {shown(seconds)}"
            raise bad_field("expires_after.seconds", message) from None


async def create_file(request: Request) -> Response:
    """Answer POST /v1/files. The fields may precede or follow the file."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_FILE_BYTES + MAX_FORM_BYTES:
        raise OpenAIError(413, f"file must have at most {MAX_FILE_BYTES} bytes", param="file", code="payload_too_large")
    form, files = _Form(), gateway_of(request).batches.files
    try:
        async with aclosing(FormReader(request).parts()) as parts:
            async for part in parts:
                await _receive_part(request, form, part)
        if form.upload is None:
            raise bad_field("file", "file must be given, with a filename", code="missing_required_parameter")
        check_upload(form.purpose, form.filename, form.expires_after_s)
        file = await files.keep(
            form.upload,
            filename=form.filename,
            tenant=request.state.identity.tenant,
            purpose=form.purpose,
            expires_after_s=form.expires_after_s,
            file_id=await _reserved_id(request, form, form.upload),
        )
    except BaseException:
        if form.upload is not None:
            await files.discard(form.upload)
        raise
    return json_response(file)


async def _reserved_id(request: Request, form: _Form, upload: Upload) -> str | None:
    """Return the file id that an ``Idempotency-Key`` stands for; None without one."""
    content = msgspec.json.encode((upload.sha256, form.filename, form.purpose, form.expires_after_s)).decode()
    request.state.body_digest = digest_of(request.state.route, content)
    entry = await reserve(request)
    return None if entry is None else f"file-{entry[0].seed}"


async def _receive_part(request: Request, form: _Form, part: FormPart) -> None:
    if part.name == "file" and part.filename is not None:
        if form.upload is not None:
            raise bad_field("file", "file must be one file")
        if "purpose" in form.fields:  # refuse early, before the file is received
            check_upload(form.purpose, part.filename, form.expires_after_s)
        form.filename = part.filename
        form.upload = await gateway_of(request).batches.files.receive(part.chunks)
    elif part.name in ("purpose", _SECONDS, _ANCHOR):
        form.fields[part.name] = await part.text()
    elif gateway_of(request).settings.strict_fields:
        raise bad_field(part.name, f"{part.name} is not supported; leave it out", code="unknown_parameter")
    else:
        await part.text()
        request.state.ignored = (*getattr(request.state, "ignored", ()), part.name)


async def list_files(request: Request) -> Response:
    """Answer GET /v1/files."""
    query = request.query_params
    page = await gateway_of(request).batches.files.list(
        tenant=request.state.identity.tenant,
        after=query.get("after"),
        limit=limit_of(request, MAX_LIMIT),
        order=query.get("order", "desc"),
        purpose=query.get("purpose"),
    )
    return json_response(page)


async def retrieve_file(request: Request) -> Response:
    """Answer GET /v1/files/{file_id}."""
    files, tenant = gateway_of(request).batches.files, request.state.identity.tenant
    return json_response(await files.get(request.path_params["file_id"], tenant=tenant))


async def file_content(request: Request) -> Response:
    """Answer GET /v1/files/{file_id}/content."""
    files, tenant = gateway_of(request).batches.files, request.state.identity.tenant
    path = await files.path(request.path_params["file_id"], tenant=tenant)
    return FileResponse(path, media_type="application/octet-stream")


async def delete_file(request: Request) -> Response:
    """Answer DELETE /v1/files/{file_id}."""
    files, tenant = gateway_of(request).batches.files, request.state.identity.tenant
    return json_response(await files.delete(request.path_params["file_id"], tenant=tenant))


def limit_of(request: Request, default: int) -> int:
    """Return the query's ``limit``.

    Raises:
        OpenAIError: 400, it is not a number.
    """
    text = request.query_params.get("limit")
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise bad_field("limit", f"limit must be a number, got {shown(text)}")
    return int(text)


def query_parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    """Return OpenAPI's description of a query parameter."""
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


AFTER = query_parameter("after", {"type": "string"}, "The last id of the previous page.")
_LIMIT = query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}, "Maximum number of items.")
_ORDER = query_parameter(
    "order", {"type": "string", "enum": ["asc", "desc"]}, "By creation time; newest first by default."
)
_PURPOSE = query_parameter("purpose", {"type": "string", "enum": list(PURPOSES)}, "Only files with this purpose.")

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/files",
        handler=create_file,
        summary="Upload a file",
        body=FileUpload,
        body_media_type="multipart/form-data",
        response=FileObject,
        statuses=(400, 409, 413),
    ),
    Operation(
        method="GET",
        path="/v1/files",
        handler=list_files,
        summary="List files",
        response=Page[FileObject],
        statuses=(400,),
        parameters=(AFTER, _LIMIT, _ORDER, _PURPOSE),
    ),
    Operation(
        method="GET",
        path="/v1/files/{file_id}",
        handler=retrieve_file,
        summary="Describe a file",
        response=FileObject,
    ),
    Operation(
        method="GET",
        path="/v1/files/{file_id}/content",
        handler=file_content,
        summary="Download a file",
        media_type="application/octet-stream",
    ),
    Operation(
        method="DELETE", path="/v1/files/{file_id}", handler=delete_file, summary="Delete a file", response=Deleted
    ),
)
