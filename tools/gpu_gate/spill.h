// Included before a source of neox-kernels: its own limits would take the place of -maxrregcount.
#undef __launch_bounds__
#define __launch_bounds__(...)
