"""The parts of decoders and encoders, testable alone. They call ops of a backend and use no array library."""
