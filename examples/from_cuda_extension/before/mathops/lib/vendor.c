// A library from elsewhere, which a real project would find installed.
double vendor_half(void) { return 0.5; }
