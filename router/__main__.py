"""The router process: parses its settings, builds its parts, runs them until told to stop."""

import asyncio
import dataclasses
import uuid

import structlog
from fastapi import FastAPI

from router.config import RouterConfig
from router.dispatcher import DRAINING, ClusterDispatcher
from router.grpc_server import InferenceServer
from router.http import create_app
from router.internal_server import InternalServer
from router.join import ClusterServicer
from router.membership import Membership
from router.metrics import RouterMetrics
from router.openai.routes import OpenAI
from router.pacing import Pacer
from router.server import InferenceServicer
from router.serving import Serving
from router.tokenizing import TokenizingLimits
from router.validation import RequestValidator
from splitserve.models.description import ModelDescription
from splitserve.models.locate import locate_model
from splitserve.models.tokenizer import Tokenizer
from splitserve.service.config import exit_status_of, run_process
from splitserve.service.errors import SplitserveError, Unavailable
from splitserve.service.http_server import HttpServer, serve_http
from splitserve.service.lifecycle import StopRequest, first_of, run_loop
from splitserve.service.logging import configure_logging
from splitserve.service.metrics import new_registry
from splitserve.service.startup import collect_rarely

log: structlog.stdlib.BoundLogger = structlog.get_logger("router")

# For the last words to leave; every call has been told its end by then.
_STOP_GRACE_S = 2.0


def main(config: RouterConfig) -> int:
    configure_logging("router", config.log_level)
    try:
        model = locate_model(config.model, revision=config.revision, loads_weights=False)
        tokenizer = Tokenizer.load(model.directory)
    except SplitserveError as error:
        log.error("cannot serve", reason=error.message)
        return exit_status_of(error)
    if config.served_model_name:
        model = dataclasses.replace(model, name=config.served_model_name)
    return run_loop(lambda stop: Router(config, model, tokenizer).run(stop), config.parent_fd)


class Router:
    """The composition root: who knows whom."""

    def __init__(self, config: RouterConfig, model: ModelDescription, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._chat_preparation: asyncio.Future[None] | None = None
        self._registry = new_registry()
        metrics = RouterMetrics(self._registry, model.name)
        self._membership = Membership(config, model.name, model.revision)
        self._pacer = Pacer()
        self._dispatcher = ClusterDispatcher(config, self._membership, metrics, self._pacer)
        self._validator = RequestValidator(
            model,
            tokenizer,
            self._membership.limits,
            tokenizing=TokenizingLimits(
                max_requests=config.max_tokenizing_requests, max_bytes=config.max_tokenizing_bytes
            ),
        )
        serving = Serving(
            detokenizer=tokenizer,
            validator=self._validator,
            dispatcher=self._dispatcher,
            metrics=metrics,
            request_timeout_s=config.request_timeout,
        )
        servicer = InferenceServicer(
            serving,
            model=model,
            validator=self._validator,
            limits=self._membership.limits,
            has_chat_template=tokenizer.has_chat_template,
        )
        self._api = OpenAI(model=model, serving=serving, validator=self._validator, tokenizer=tokenizer).routes()
        self._calls = serving.calls
        self._public = InferenceServer(servicer)
        cluster = ClusterServicer(config, self._membership, uuid.uuid4().hex, metrics.count_ignored)
        self._internal = InternalServer(cluster, config.internal_bind, config.internal_port)
        metrics.watch_load(
            running=self._membership.num_running,
            waiting=lambda: len(self._dispatcher.queue),
            kv_cache_usage=self._membership.kv_cache_usage,
            token_pause=lambda: self._pacer.pause_s,
        )
        self._membership.on_change(self._tell_readiness)

    def _tell_readiness(self) -> None:
        self._public.set_ready(self._dispatcher.is_ready)
        if self._dispatcher.is_ready and self._chat_preparation is None:
            # Not before: it would take the processor from workers that start beside this router.
            loop = asyncio.get_running_loop()
            self._chat_preparation = loop.run_in_executor(None, self._tokenizer.prepare_chat)

    async def run(self, stop: StopRequest) -> int:
        config = self._config
        try:
            internal_port = await self._internal.start()
            grpc_port = await self._public.start(config.bind, config.grpc_port)
            http = await serve_http(self._app(), config.bind, config.http_port)
        except OSError as error:
            log.error("cannot listen", reason=str(error))
            return exit_status_of(error)
        collect_rarely()
        log.info("listening", grpc=grpc_port, http=http.port, internal=internal_port)
        # To the end: a worker that dies while the last streams run is to be found as well.
        watches = self._membership.watch(), self._pacer.watch(), self._internal.follow()
        await first_of(*watches, self._serve(stop, http))
        await self._internal.stop()
        self._validator.close()
        return stop.status

    async def _serve(self, stop: StopRequest, http: HttpServer) -> None:
        """Until it is time to end. When asked to drain, streams have a while to end by themselves."""
        await first_of(stop.wait(), stop.wait_for_drain())
        self._dispatcher.drain()
        self._tell_readiness()
        if not stop.is_set():
            log.info("draining", timeout_s=self._config.drain_timeout)
            await first_of(stop.wait(), self._calls.until_none(), asyncio.sleep(self._config.drain_timeout))
            stop.set("drained")
        log.info("stopping", reason=stop.reason)
        self._calls.end_all(Unavailable(DRAINING, reason="DRAINING", retry_after_s=1.0))
        await asyncio.gather(self._public.stop(_STOP_GRACE_S), http.stop())

    def _app(self) -> FastAPI:
        return create_app(
            api=self._api,
            not_ready_reason=lambda: None if self._dispatcher.is_ready else self._dispatcher.why_not_ready(),
            cluster=lambda: (
                self._membership.describe()
                | {
                    "queue": {
                        "requests": len(self._dispatcher.queue),
                        "prompt_tokens": self._dispatcher.queue.num_tokens,
                    }
                }
            ),
            registry=self._registry,
        )


if __name__ == "__main__":
    run_process("router", "Takes requests in and streams tokens out.", RouterConfig, main)
