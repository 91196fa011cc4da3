"""Share out each global batch so that all devices finish together.

sampler      cuts global batch k of the epoch by the plan in force at step k
step_timer   times this rank's own work in that step, waiting on peers left out
...          every N steps the strategy gathers one `WindowStats` from each rank
throughput   learns each device's lines: seconds = fixed_s + seconds_per_sample x samples (line_fit)
sync_fit     learns from all ranks together which part of the all-reduce hides behind the backward pass
solver       finds the whole numbers that make the slowest device as fast as can be (optperf)
controller   keeps the plan, or makes a new one where that is sure to pay (evidence, probe)
plan         holds from a step on that no loader has drawn yet, the same on all ranks
sampler      cuts by it from there on; which samples a step sees never depends on it

Where the global batch itself may change, between epochs:

gradient_norms  reads each rank's gradient norm and that of their mean off the buckets of DDP
noise_scale     tells from both, for unequal batches, how many samples still average out noise
goodput         weighs that against the time of a step, and names the batch with the most progress per second
lr_scaling      scales the learning rate and paces schedulers to match
"""
