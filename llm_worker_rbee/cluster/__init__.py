"""Several machines: a front and engines as deployments of Ray Serve. `serve run llm_worker_rbee.cluster:app` runs it.

A cluster is an application with two deployments (app.py): `Front`, the HTTP application of `llm-worker-rbee serve`, and
`Engine`, one for each GPU or machine (engine.py). The front's end of the protocol between them is `RayEngine`
(ray_engine.py); its requests are routed by the hashes of their KV blocks (router.py).
"""

try:
    import ray.serve  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"llm_worker_rbee.cluster needs Ray Serve ({error}): pip install 'llm-worker-rbee[ray]'"
    ) from None

from .app import app

__all__ = ["app"]
