"""The parts of a decoder block, one file each, testable alone. They call ops of a backend and use no array library."""
