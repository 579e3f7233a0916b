"""Other programs measured in turn with this worker: programs, servers, where they are found, plans and suites."""
