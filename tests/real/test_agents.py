"""Coding agents from npm with a real model: each is asked to edit a file; how far it gets is the model's matter.

The worker's part is required: every request is answered with 200, the second turn finds the first in the prefix cache,
and the agent ends by itself. `make test-agents` installs the agents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.extra.test_coding_agents import CLIENTS, program, start_agent
from tests.helpers.serve_process import ServeProcess

TASK = "The file greet.py has a function greet. Change it so that it returns 'Hello, ' followed by the name."
CODE = "def greet(name):\n    return 'Hi ' + name\n"
LIMIT_S = 900  # of a session: a prompt of an agent has thousands of tokens

pytestmark = pytest.mark.skipif(not CLIENTS, reason="needs LLM_WORKER_CLIENTS: make test-agents sets it")
