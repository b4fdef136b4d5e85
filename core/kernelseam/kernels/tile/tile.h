// The tile vocabulary as shared kernels include it. README.md beside this file is its contract.
#pragma once
#include "platform.h"
#include "tile/simt.h"

template<class T, class S, int TF32> struct EngineOf;
template<class T> struct EngineOf<T, T, 0> { typedef MatrixEngine<T> type; };
template<> struct EngineOf<float, float, 0> { typedef SimtEngine<float> type; };
#if !KS_MATRIX_DOUBLE
template<> struct EngineOf<double, double, 0> { typedef SimtEngine<double> type; };
#endif
#ifdef KS_TF32
template<int PRODUCTS> struct EngineOf<float, float, PRODUCTS> { typedef Tf32Engine<PRODUCTS> type; };
#endif
#if KS_E4M3
template<class T> struct EngineOf<T, e4m3, 0> { typedef E4m3Engine<T> type; };
template<> struct EngineOf<e4m3, e4m3, 0> { typedef MatrixEngine<e4m3> type; };
#endif
// The engine that multiplies tiles of T: matrix units for f16, bf16 and e4m3, multiply-adds for float, and for double one of the
// two (KS_MATRIX_DOUBLE, a constant of the arch's row). S: the type in which right factors are stored, T or, where the arch has
// KS_E4M3, e4m3. TF32: in how many products of TF32 float is multiplied, where the platform has KS_TF32; 0: as it is.
template<class T, class S = T, int TF32 = 0> using Engine = typename EngineOf<T, S, TF32>::type;
// How much of K, a multiple of 16, a loop multiplies at once: a variable, as a device function is none of a namespace's constants.
template<class E, int K> constexpr int K_PIECE = K % E::K_STEP == 0 ? E::K_STEP : K % (E::K_STEP / 2) == 0 ? E::K_STEP / 2 : 16;
template<class E, int K> KS_DEVICE constexpr int k_piece() { return K_PIECE<E, K>; }
