# What this project takes from scipy, for pyrefly: the library states no types, and to read its source
# took a tenth of the time. A name that a file here misses is added there.
