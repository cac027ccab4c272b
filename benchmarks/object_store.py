"""A server of files that speaks as much of S3 as a reader needs, and answers each request after a pause.

A process of its own, with one thread: ``python benchmarks/object_store.py FOLDER LATENCY_S`` serves the files
below FOLDER from memory as the bucket "photos" and prints its port. Signatures are not checked.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000


class Store:
    """Objects by name.

    Args:
        folder: The files.
        latency_s: From a request's arrival to the answer.
    """

    def __init__(self, folder: Path, latency_s: float) -> None:
        self.latency_s = latency_s
        self.objects = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self.names = sorted(self.objects)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, target, _ = head.split("\r\n", 1)[0].split(" ")
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                status, kind, body = self.answer(target)
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    f'ETag: "{len(body)}"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n'.encode()
                )
                if method == "GET":
                    writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    def answer(self, target: str) -> tuple[str, str, bytes]:
        """Status, type and body for a path such as /photos/cat/1.jpg or /photos?list-type=2."""
        parts = urlsplit(target)
        name = unquote(parts.path).strip("/").partition("/")[2]
        if not name:
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            return "200 OK", "application/xml", self.listing(query)
        if name in self.objects:
            return "200 OK", "image/jpeg", self.objects[name]
        return "404 Not Found", "application/xml", b"<Error><Code>NoSuchKey</Code></Error>"

    def listing(self, query: dict[str, str]) -> bytes:
        """One page of ListObjectsV2."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", "")
        objects, folders, last = [], [], ""
        for name in self.names:
            if not name.startswith(prefix) or name <= after:
                continue
            if len(objects) + len(folders) == PAGE:
                break
            last = name
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folder = prefix + rest.partition(delimiter)[0] + delimiter
                if not folders or folders[-1] != folder:
                    folders.append(folder)
            else:
                objects.append(name)
        is_more = any(name > last and name.startswith(prefix) for name in self.names) if last else False
        version = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass>"
        sizes = {name: len(self.objects[name]) for name in objects}
        entries = [
            f'<Contents><Key>{escape(name)}</Key><ETag>"{size}"</ETag><Size>{size}</Size>{version}</Contents>'
            for name, size in sizes.items()
        ]
        entries += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders]
        if is_more:
            entries.append(f"<NextContinuationToken>{escape(last)}</NextContinuationToken>")
        return (
            '<?xml version="1.0" encoding="UTF-8"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>photos</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(objects) + len(folders)}</KeyCount>"
            f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(is_more).lower()}</IsTruncated>{''.join(entries)}"
            "</ListBucketResult>"
        ).encode()


async def main(folder: Path, latency_s: float) -> None:
    """Serve until standard input is closed."""
    store = Store(folder, latency_s)
    server = await asyncio.start_server(store.serve, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)  # clients keep their connections open


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
