"""Stages as things that run: ONNX Runtime on the CPU and on CUDA, TensorRT.

Each belongs to one kind of device, which decides what a buffer is: NumPy arrays on the CPU, device
addresses on CUDA.
"""
