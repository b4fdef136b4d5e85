// A launch from a file, as an executable of its own. Included after entry.h.
//
// The file, in 64-bit words: blocks, threads, bytes of shared memory, bytes of arguments, number of pointers among
// these, number of buffers; the offset of each pointer; the arguments; then each buffer: its bytes, whether it is a list
// of addresses, its contents. Arguments and contents are padded to whole words. An address of byte x of buffer i is
// written as (i + 1)·2⁴⁰ + x, so that every buffer can be an allocation that ends with its last byte.
// Afterwards the buffers' contents, unpadded, are written to a second file.
#pragma once

static void read_exactly(FILE* file, void* to, size_t bytes) {
  char padding[8];
  if (fread(to, 1, bytes, file) != bytes) exit(2);
  const size_t rest = (8 - bytes % 8) % 8;
  if (rest && fread(padding, 1, rest, file) != rest) exit(2);
}

int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  if (!file) return 2;
  size_t head[6];
  read_exactly(file, head, sizeof head);
  const size_t argument_bytes = head[3], pointers = head[4], buffers = head[5];
  size_t* const offsets = (size_t*)malloc(pointers * 8);
  char* const arguments = (char*)malloc(argument_bytes);
  char** const memory = (char**)malloc(buffers * sizeof(char*));
  size_t* const sizes = (size_t*)malloc(buffers * 8);
  bool* const is_list = (bool*)malloc(buffers);
  read_exactly(file, offsets, pointers * 8);
  read_exactly(file, arguments, argument_bytes);
  for (size_t i = 0; i < buffers; i++) {
    size_t about[2];
    read_exactly(file, about, sizeof about);
    sizes[i] = about[0], is_list[i] = about[1];
    memory[i] = (char*)malloc(sizes[i]);
    read_exactly(file, memory[i], sizes[i]);
  }
  fclose(file);
  auto translate = [&](char* place) {
    size_t word;
    memcpy(&word, place, 8);
    if (!word) return;
    char* const address = memory[(word >> 40) - 1] + (word & ((1ull << 40) - 1));
    memcpy(place, &address, 8);
  };
  for (size_t i = 0; i < pointers; i++) translate(arguments + offsets[i]);
  for (size_t i = 0; i < buffers; i++)
    for (size_t at = 0; is_list[i] && at < sizes[i]; at += 8) translate(memory[i] + at);

  char message[512];
  const int failed = kernelseam_launch(arguments, argument_bytes, head[0], head[1], head[2], message, sizeof message);
  if (failed) fprintf(stderr, "launch failed: %s\n", message);
  file = fopen(names[2], "wb");
  if (!file) return 2;
  for (size_t i = 0; i < buffers; i++) {
    if (fwrite(memory[i], 1, sizes[i], file) != sizes[i]) return 2;
    free(memory[i]);
  }
  if (fclose(file)) return 2;
  free(offsets), free(arguments), free(memory), free(sizes), free(is_list);
  return failed;
}
