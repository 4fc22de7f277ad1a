// What a kernel computes of each element that it loads: nothing, unless the kernel is composed with
// a pointwise function, `f >> op`; jitkern then generates a header of this name.
//
// value: an element of the first argument, in the type that the kernel computes in. row, column: its
// place in that argument, seen as a matrix of its last dimension. A kernel that includes this header
// is a template over T, the type of the elements, and ends its parameters with PROLOGUE_PARAMETERS,
// without a comma (before EPILOGUE_PARAMETERS, where it has both).
#pragma once
#define PROLOGUE_PARAMETERS
#define PROLOGUE(value, row, column) (value)
