"""What a stage computes and when: scheduler, sampling, warm-up, probe."""
