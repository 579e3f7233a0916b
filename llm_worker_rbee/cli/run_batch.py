"""`llm-worker-rbee run-batch`: the lines of a file, answered by the routes of the server, without a server."""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from hashlib import file_digest
from pathlib import Path
from typing import BinaryIO

from ..errors import InvalidRequestError, counted
from ..progress import request_progress
from ..server.app import make_runner
from ..server.batch_store import FileStore, print_openai, write_file
from ..server.batches import Batch, BatchRunner
from ..server.worker import Front
from ..token_engine.protocol import Load
from .commands import (
    LimitFlags,
    MeasuringFlags,
    PoolingServeFlags,
    ProcessFlags,
    RunBatchCommand,
    ServeCommand,
    WireFlags,
)
from .loading import LoadingOutput, load_options, option_names_in_errors, set_up
from .options import FilesFlags, PoolFlags, ServedFlags
from .serve import pooling_references, reserved_bytes, server_settings, with_children
from .terminal import note

BATCH = "batch_" + "0" * 32
POLL_S = 0.1
FOR_EVER_S = 1 << 40


def run_batch(options: RunBatchCommand) -> None:
    """Answer the lines, or those that an earlier run has left."""
    if options.target.exists():
        raise InvalidRequestError(f"{options.target} exists already: remove it, or name another file", "OUT")
    with options.source.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    folder = options.target.with_name(options.target.name + ".batch")
    with closing(FileStore(folder, max_bytes=1, max_age_s=1, option="OUT.batch")) as store:
        _run_lines(store, _open_batch(store, digest, folder), options)
    with suppress(OSError):
        folder.rmdir()


def _run_lines(store: FileStore, batch: Batch, options: RunBatchCommand) -> None:
    served = ServeCommand(
        wire=WireFlags(),
        limits=LimitFlags(),
        files=FilesFlags(),
        model=ServedFlags(
            models=None if options.model.model is None else [options.model.model],
            max_context=options.model.max_context,
            chat_template=options.model.chat_template,
        ),
        pool=PoolFlags(),
        pooling=PoolingServeFlags(embedding_model=options.embedding_model),
        computing=options.computing,
        sharing=options.sharing,
        process=ProcessFlags(),
        measuring=MeasuringFlags(),
    )
    set_up(options.computing)
    references = pooling_references(served.pooling, served.process.engine_process)
    load = load_options(options.model, options.computing, options.sharing)
    loads = [Load(options=replace(load, reserved_memory=reserved_bytes(references)))]
    settings = server_settings(served, None, load)
    with option_names_in_errors(), LoadingOutput() as shown:
        worker = with_children(settings, served, loads, references, shown)
        start = time.perf_counter()
        try:
            asyncio.run(_run(worker, batch, options, shown.close))
        except KeyboardInterrupt:
            note(f"{counted(len(batch.finished), 'line')} finished: the same command goes on")
            raise
    _write(store, batch, options.target)
    if not options.quiet:
        failed, seconds = batch.num_failed, time.perf_counter() - start
        note(f"{counted(len(batch.finished), 'line')} in {seconds:.1f} s, {failed:,} of them with an error")


def _open_batch(store: FileStore, digest: str, folder: Path) -> Batch:
    """Return the batch of an earlier run of the same input, or a new one."""
    journal = next((journal for name, journal in store.journals() if name == BATCH), None)
    batch = None if journal is None else Batch.recover(BATCH, journal)
    if batch is None or not batch.finished:
        now = int(time.time())
        state = {"status": "validating", "endpoint": None, "created_at": now, "expires_at": now + FOR_EVER_S}
        state["input_file_id"] = digest
        return Batch(BATCH, state, store.create_journal(BATCH, state))
    if batch.state["input_file_id"] != digest:
        raise InvalidRequestError(f"{folder} has results of another input: remove it to begin anew", "OUT")
    note(f"going on: {counted(len(batch.finished), 'line')} finished")
    return batch


async def _run(worker: Front, batch: Batch, options: RunBatchCommand, on_ready: Callable[[], object]) -> None:
    runner = make_runner(worker)
    loading = asyncio.ensure_future(worker.start())
    try:
        await loading
        on_ready()
        await _answer(worker, runner, batch, options)
    finally:
        loading.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await runner.flush()
        worker.settings = replace(worker.settings, shutdown_timeout_s=0.0)
        await worker.stop()


async def _answer(worker: Front, runner: BatchRunner, batch: Batch, options: RunBatchCommand) -> None:
    """Run the batch, and show how far it is."""

    def open_input() -> BinaryIO:
        return options.source.open("rb")

    assert worker.chat is not None
    running, latencies = asyncio.ensure_future(runner.run(batch, open_input)), worker.chat.latencies
    try:
        while batch.lines is None and not running.done():
            await asyncio.wait([running], timeout=POLL_S)
        lines = tokens = 0
        with request_progress(batch.state.get("total", 0), not options.quiet, noun="lines") as advance:
            while True:
                is_done = running.done()
                advance(requests=len(batch.finished) - lines, tokens=latencies.num_tokens - tokens)
                lines, tokens = len(batch.finished), latencies.num_tokens
                if is_done:
                    break
                await asyncio.wait([running], timeout=POLL_S)
        if await running == "failed":
            raise InvalidRequestError(f"{options.source}: {batch.state['errors'][0]['message']}", "IN")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _write(store: FileStore, batch: Batch, target: Path) -> None:
    """Write the results, whole or not at all; the journal is needed no more then."""
    write_file(store.folder, target.name, (print_openai(result, BATCH) for result in batch.results()))
    os.replace(target.name, target, src_dir_fd=store.folder)
    store.delete_journal(BATCH)
