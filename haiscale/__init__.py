"""Training on many devices. So far: the schedules of pipelines, in `haiscale.pipeline`."""
