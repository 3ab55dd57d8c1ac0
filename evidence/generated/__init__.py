"""Generated decoders: designs that are right, faults that are placed, and the measurement of what kvdoctor says."""
