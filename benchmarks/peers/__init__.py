"""The other ways to train on a long sequence that ``speed.py`` measures, and the processes in which they run.

Every arm is built by a function of a shape and a compiler, and takes steps (``arm.Arm``). Those that need only torch
and cp_compile are in ``arms.py``; those of DeepSpeed, which run in an environment without cp_compile, in
``deepspeed_arms.py``.
"""
