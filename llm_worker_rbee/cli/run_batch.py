"""`llm-worker-rbee run-batch`: the lines of a file, answered by the routes of the server, without a server."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import file_digest
from pathlib import Path

from ..errors import InvalidRequestError, counted
from ..progress import request_progress
from ..server.app import Routes
from ..server.batch_store import CHUNK_BYTES
from ..server.batches import Batch, BatchService
from ..server.worker import Front
from ..token_engine.protocol import Load
from .commands import RunBatchCommand, ServeCommand
from .loading import LoadingOutput, load_options, option_names_in_errors, set_up
from .options import with_defaults
from .serve import pooling_references, reserved_bytes, server_settings, with_children
from .terminal import note

POLL_S = 0.1
FOR_EVER_S, UNLIMITED = 1 << 40, 1 << 60
Work = list[str | None]  # the digest of the input, the models


def run_batch(options: RunBatchCommand) -> None:
    """Answer the lines, or those that an earlier run has left."""
    if options.target.exists():
        raise InvalidRequestError(f"{options.target} exists already: remove it, or name another file", "OUT")
    with options.source.open("rb") as file:
        work = [file_digest(file, "sha256").hexdigest(), options.model.model, options.embedding_model]
    folder = options.target.with_name(options.target.name + ".batch")
    model = options.model
    served: ServeCommand = with_defaults(
        ServeCommand,
        models=None if model.model is None else [model.model],
        max_context=model.max_context,
        chat_template=model.chat_template,
        embedding_model=options.embedding_model,
        files_dir=folder,
    )
    served = replace(served, computing=options.computing, sharing=options.sharing)
    set_up(options.computing)
    references = pooling_references(served.pooling, served.process.engine_process)
    load = load_options(model, options.computing, options.sharing)
    loads = [Load(options=replace(load, reserved_memory=reserved_bytes(references)))]
    settings = replace(server_settings(served, None, load), files_bytes=UNLIMITED, files_age_s=float(FOR_EVER_S))
    with option_names_in_errors(), LoadingOutput() as shown:
        worker = with_children(settings, served, loads, references, shown)
        service = BatchService(worker, Routes(worker).answer, "OUT.batch")
        start = time.perf_counter()
        try:
            begun = _find_batch(service, folder, work)
            batch = asyncio.run(_run(worker, service, begun, work, options, shown.close))
        except KeyboardInterrupt:
            finished = sum(batch.num_finished for batch in service.batches.values())
            note(f"{counted(finished, 'line')} finished: the same command goes on")
            raise
        finally:
            service.store.close()
    shutil.rmtree(folder, ignore_errors=True)
    if not options.quiet:
        counts, seconds = batch.counts, time.perf_counter() - start
        note(f"{counted(counts['total'], 'line')} in {seconds:.1f} s, {counts['failed']:,} of them with an error")


def _find_batch(service: BatchService, folder: Path, work: Work) -> Batch | None:
    """Return the batch of an earlier run of the same work; forget one without results."""
    for batch in list(service.batches.values()):
        if batch.state["work"] == work and batch.state["status"] != "failed":
            note(f"going on: {counted(batch.num_finished, 'line')} finished")
            return batch
        if batch.num_finished:
            message = f"{folder} has results of another input, or of another model: remove it to begin anew"
            raise InvalidRequestError(message, "OUT")
        service.drop(batch)
    return None


async def _run(
    worker: Front,
    service: BatchService,
    begun: Batch | None,
    work: Work,
    options: RunBatchCommand,
    on_ready: Callable[[], object],
) -> Batch:
    """Run a batch to its end, and write its results."""
    loading = asyncio.ensure_future(worker.start())
    try:
        await loading
        on_ready()
        service.start()
        batch = begun
        if batch is None:
            with options.source.open("rb") as file:
                stored = service.store.add(iter(partial(file.read, CHUNK_BYTES), b""), options.source.name, "batch")
            batch = await service.create("batch", None, stored.id, FOR_EVER_S, work=work)
        await _show(worker, batch, options)
    finally:
        loading.cancel()
        await service.stop()
        worker.settings = replace(worker.settings, shutdown_timeout_s=0.0)
        await worker.stop()
    _write(service, batch, options.target)
    return batch


async def _show(worker: Front, batch: Batch, options: RunBatchCommand) -> None:
    """Show how far the batch is, until its end."""
    while not batch.counts["total"] and batch.is_open:
        await asyncio.sleep(POLL_S)
    assert worker.chat is not None
    latencies, lines, tokens = worker.chat.latencies, 0, 0
    with request_progress(batch.counts["total"], not options.quiet, noun="lines") as advance:
        while True:
            is_open, finished = batch.is_open, batch.num_finished
            advance(requests=finished - lines, tokens=latencies.num_tokens - tokens)
            lines, tokens = finished, latencies.num_tokens
            if not is_open:
                break
            await asyncio.sleep(POLL_S)
    if batch.state["status"] == "failed":
        raise InvalidRequestError(f"{options.source}: {batch.state['errors'][0]['message']}", "IN")


def _write(service: BatchService, batch: Batch, target: Path) -> None:
    """Write the results, whole or not at all."""
    store = service.store
    ids = [batch.state[name] for name in ("output_file_id", "error_file_id") if name in batch.state]
    store.write(target.name, (chunk for file_id in ids for chunk in store.read(file_id)))
    os.replace(target.name, target, src_dir_fd=store.folder)
