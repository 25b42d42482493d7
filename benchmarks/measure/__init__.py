"""What benchmarks share: a clock, real pairs and a model to run on, the peers they are compared with, and a report."""
