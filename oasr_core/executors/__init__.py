"""The executors drive the step: offline micro-batches and streaming cohorts."""
