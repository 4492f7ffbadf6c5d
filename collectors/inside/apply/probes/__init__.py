"""What is measured of a job on copies, and changes nothing in it: codecs of gradients, bits of weights."""
