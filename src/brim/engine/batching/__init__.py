"""Requests in, batches through a model, answers out, each before its deadline."""

from brim.engine.batching.policy import BatcherConfig, BatchPolicy, RequestPart, StartBatch, Wait
from brim.engine.batching.runner import BatchRunner
from brim.engine.batching.servable import Answer, DecodedRequest, Payload, RequestShape, Servable
from brim.engine.batching.service_times import PoolTimes

__all__ = [
    "Answer", "BatchPolicy", "BatchRunner", "BatcherConfig", "DecodedRequest", "Payload", "PoolTimes",
    "RequestPart", "RequestShape", "Servable", "StartBatch", "Wait",
]  # fmt: skip
