"""The routes about LoRA adapters: `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` as in vLLM, `/lora-adapters` as
in llama-server. Paths lie below --lora-dir. Errors have the form of OpenAI's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ...errors import InvalidRequestError
from ...sampling_params import Bounds
from ..dialect import Call, Dialect, Front, Handler, Operation, Route, Worker
from ..json_schema import COUNT, FLAG, NUMBER, TEXT, Schema, array_schema, object_schema, reply_schema
from ..schema import Boolean, Field, Number, ParseOptions, Text, decode_object, table_schema, validate_known
from ..settings import ServerSettings
from .openai import LORA_SCALES, error_body

LOAD = {
    "lora_name": Field(Text(1), required=True),
    "lora_path": Field(Text(1), required=True),
    "load_inplace": Field(Boolean(), False),
    "scale": Field(Number(Bounds(-1000, 1000)), 1.0),
    "base_model_name": Field(Text()),
}
UNLOAD = {"lora_name": Field(Text(1), required=True), "lora_int_id": Field(Number(Bounds(0)))}


class Handlers:
    """The routes, for one worker."""

    def __init__(self, worker: Front) -> None:
        self._front = worker

    @property
    def _worker(self) -> Worker:
        if self._front.chat is None:
            raise InvalidRequestError("a pool of models has no adapters: serve the model alone", "model")
        self._front.require_ready()
        return self._front.chat

    def table(self) -> dict[str, Handler]:
        return {
            "/v1/load_lora_adapter": self.load,
            "/v1/unload_lora_adapter": self.unload,
            "/lora-adapters": self.adapters,
        }

    async def load(self, call: Call) -> dict[str, Any]:
        """Load an adapter while requests run; a name that is taken gets the new one with `load_inplace` alone."""
        values: dict[str, Any] = await self._front.parse("load_lora", await call.body())
        names = self._worker.loras
        path = names.require_path(values["lora_path"])
        async with call.until_disconnect():
            named = await names.load(values["lora_name"], path, values["scale"], replaces=values["load_inplace"])
        return {"success": True, "lora_name": named.name, "rank": named.info.rank, "digest": named.info.digest.hex()}

    async def unload(self, call: Call) -> dict[str, Any]:
        """Let an adapter go; requests that use it end as they began."""
        values: dict[str, Any] = await self._front.parse("unload_lora", await call.body())
        await self._worker.loras.unload(values["lora_name"])
        return {"success": True, "lora_name": values["lora_name"]}

    async def adapters(self, call: Call) -> Any:
        """Return the adapters; POST sets the scales of requests that name none."""
        names = self._worker.loras
        if call.method == "POST":
            names.set_defaults(await self._front.parse("lora_scales", await call.body()))
            return {"success": True}
        described = [
            {"id": i, "path": named.path, "scale": names.defaults.get(named.name, 0.0), "name": named.name}
            for i, named in enumerate(names.listed)
        ]
        return described, 200, {}


def _parse_scales(body: bytes, _: ParseOptions) -> list[Any]:
    """Validate a list of ids and scales."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = decode_object(body)  # which says what is wrong
    if (issue := LORA_SCALES.validate("body", value)) is not None:
        raise InvalidRequestError(issue.message, "body")
    return LORA_SCALES.coerce(value)


def _schemas(settings: ServerSettings) -> dict[str, Schema]:
    is_open = settings.ignore_unknown_fields
    adapter = reply_schema(id=COUNT, path=TEXT, scale=NUMBER, name=TEXT)
    return {
        "LoadLora": table_schema(LOAD, is_open=is_open),
        "UnloadLora": table_schema(UNLOAD, is_open=is_open),
        "LoraScales": LORA_SCALES.json_schema(),
        "LoraAdapters": array_schema(adapter),
        "LoraDone": object_schema({"success": FLAG, "lora_name": TEXT}, "success", is_open=True),
    }


DONE = Operation(summary="Set the scales of requests that name none", request="LoraScales", reply="LoraDone")
DIALECT = Dialect(
    prefixes=("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters"),
    error_body=error_body,
    schemas=_schemas,
    error_schema="OpenAIError",
    parsers={
        "load_lora": (lambda body, options: validate_known(body, LOAD, options)[0], dict[str, Any]),
        "unload_lora": (lambda body, options: validate_known(body, UNLOAD, options)[0], dict[str, Any]),
        "lora_scales": (_parse_scales, list[tuple[int, float]]),
    },
    make_handlers=lambda worker: Handlers(worker).table(),
    routes=(
        Route("POST", "/v1/load_lora_adapter", replace(DONE, summary="Load an adapter", request="LoadLora")),
        Route("POST", "/v1/unload_lora_adapter", replace(DONE, summary="Unload an adapter", request="UnloadLora")),
        Route(
            "GET",
            "/lora-adapters",
            replace(DONE, summary="The adapters (llama-server)", request=None, reply="LoraAdapters"),
        ),
        Route("POST", "/lora-adapters", DONE),
    ),
)
