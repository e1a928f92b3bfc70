"""Records of an earlier version, in Redis and in journals, keep their meaning. Lines here are only added."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.producer.batches.batch_records import BatchSpec, FileObject, FileRecord, read_batch
from penstock.producer.batches.journal import JournalRow, journal_path, read_rows

FILE = (
    b'{"version":1,"file":{"id":"file-1","bytes":3,"created_at":1795290000,"filename":"in.jsonl","purpose":"batch",'
    b'"object":"file","expires_at":1797882000,"status":"processed","status_details":null},"tenant":"acme","sha256":"ca97"}'
)
SPEC = (
    b'{"version":1,"id":"batch_1","tenant":"acme","input_file_id":"file-1","endpoint":"/v1/completions",'
    b'"created_at":1795290000,"expires_at":1795376400,"completion_window":"24h","metadata":{"a":"b"},'
    b'"output_expires_after_s":3600,"webhook_url":"https://example.org/","is_private":true}'
)
JOURNAL = b'[1,true,{"id":"batch_req_1"},5,1,2]\n[0,false,{"id":"batch_req_0"},7,0,3]\n'


def test_a_file_and_a_batch_of_version_1() -> None:
    file = FileObject(
        id="file-1", bytes=3, created_at=1795290000, filename="in.jsonl", purpose="batch", expires_at=1797882000
    )
    assert msgspec.json.decode(FILE, type=FileRecord) == FileRecord(file=file, tenant="acme", sha256="ca97")
    spec = BatchSpec(
        id="batch_1",
        tenant="acme",
        input_file_id="file-1",
        endpoint="/v1/completions",
        created_at=1795290000,
        expires_at=1795376400,
        metadata={"a": "b"},
        output_expires_after_s=3600,
        webhook_url="https://example.org/",
        is_private=True,
    )
    record = read_batch(
        {
            "spec": SPEC,
            "status": b"failed",
            "failed_at": b"1795290007",
            "total": b"2",
            "errors": b'{"data":[{"code":"empty_file","message":"m","line":null,"param":null}],"object":"list"}',
            "event": b"due",
        }
    )
    assert record.spec == spec
    assert (record.batch.status, record.batch.failed_at, record.batch.request_counts.total) == ("failed", 1795290007, 2)
    assert record.batch.errors is not None
    assert record.batch.errors.data[0].code == "empty_file"


def test_a_journal_of_version_1(tmp_path: Path) -> None:
    journal_path(tmp_path, 1, "a").write_bytes(JOURNAL)
    assert list(read_rows(tmp_path, 2)) == [
        JournalRow(1, True, msgspec.Raw(b'{"id":"batch_req_1"}'), 5, 1, 2),
        JournalRow(0, False, msgspec.Raw(b'{"id":"batch_req_0"}'), 7, 0, 3),
    ]
