// What a kernel computes of each result before it is stored: nothing, unless the kernel is composed
// with a pointwise function, `op >> f`; jitkern then generates a header of this name.
//
// value: a result in the type that the kernel computes in. row, column: its place in the output,
// seen as a matrix of its last dimension. A kernel that includes this header is a template over T,
// the type of the elements, and ends its parameters with EPILOGUE_PARAMETERS, without a comma.
#pragma once
#define EPILOGUE_PARAMETERS
#define EPILOGUE(value, row, column) (value)
