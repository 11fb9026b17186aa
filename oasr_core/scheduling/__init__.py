"""Admission control, batching policies and partition: pure host logic, no tensors."""
