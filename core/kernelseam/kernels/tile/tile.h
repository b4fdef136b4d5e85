// The tile vocabulary as shared kernels include it. README.md beside this file is its contract.
#pragma once
#include "platform.h"
#include "tile/simt.h"

template<class T> struct EngineOf { typedef MatrixEngine<T> type; };
template<> struct EngineOf<float> { typedef SimtEngine<float> type; };
#if !KS_MATRIX_DOUBLE
template<> struct EngineOf<double> { typedef SimtEngine<double> type; };
#endif
// The engine that multiplies tiles of T: matrix units for f16 and bf16, multiply-adds for float, and for double one of the
// two (KS_MATRIX_DOUBLE, a constant of the arch's row).
template<class T> using Engine = typename EngineOf<T>::type;
// How much of K, a multiple of 16, a loop multiplies at once.
template<class E, int K> KS_DEVICE constexpr int k_piece() { return K % E::K_STEP ? 16 : E::K_STEP; }
