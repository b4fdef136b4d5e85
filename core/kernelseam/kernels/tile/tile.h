// The tile vocabulary as shared kernels include it. README.md beside this file is its contract.
#pragma once
#include "platform.h"
#include "tile/simt.h"

template<class T, class S> struct EngineOf;
template<class T> struct EngineOf<T, T> { typedef MatrixEngine<T> type; };
template<> struct EngineOf<float, float> { typedef SimtEngine<float> type; };
#if !KS_MATRIX_DOUBLE
template<> struct EngineOf<double, double> { typedef SimtEngine<double> type; };
#endif
#if KS_E4M3
template<class T> struct EngineOf<T, e4m3> { typedef E4m3Engine<T> type; };
template<> struct EngineOf<e4m3, e4m3> { typedef MatrixEngine<e4m3> type; };
#endif
// The engine that multiplies tiles of T: matrix units for f16, bf16 and e4m3, multiply-adds for float, and for double one of the
// two (KS_MATRIX_DOUBLE, a constant of the arch's row). S: the type in which right factors are stored, T or, where the arch has
// KS_E4M3, e4m3.
template<class T, class S = T> using Engine = typename EngineOf<T, S>::type;
// How much of K, a multiple of 16, a loop multiplies at once.
template<class E, int K> KS_DEVICE constexpr int k_piece() { return K % E::K_STEP ? 16 : E::K_STEP; }
