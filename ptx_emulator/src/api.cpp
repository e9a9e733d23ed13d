// The library's C interface, called from Python by ctypes.
#include <algorithm>
#include <cstring>
#include <new>

#include "api.h"
#include "faults.h"
#include "machine.h"
#include "races.h"

namespace {
std::map<std::string, std::unique_ptr<Program>> programs;
std::string last_error;
Stats total;

// Tensor maps live among the parameters, so the copy is aligned for them.
void copy_params(const Program& program, void** args) {
    static std::vector<u8> memory;
    memory.resize(program.param_bytes + 128);
    machine.params = memory.data() + -(u64)memory.data() % 128;
    for (size_t i = 0; i < program.param_offset.size(); i++)
        memcpy(machine.params + program.param_offset[i], args[i], program.param_size[i]);
}

// The position of the error, if an instruction was being executed.
std::string position() {
    const Machine& m = machine;
    if (!m.program || !m.instruction) return "";
    const auto& all = m.program->instructions;
    if (m.instruction < all.data() || m.instruction >= all.data() + all.size()) return "";
    return "\n  in kernel " + m.program->name + "\n  " + (m.warp ? name_of(*m.warp) + ", " : "") +
           "PTX line " + std::to_string(m.instruction->line) + ": " +
           m.program->text[m.instruction - all.data()].substr(0, 1000);
}

void reset_machine() {
    machine.instruction = nullptr;
    machine.warp = nullptr;
    machine.in_event = false;
    acting = nullptr;
    machine.resident.clear();
    machine.events = {};
}

void add_to_total(const Stats& s) {
    u64* sum = (u64*)&total;
    const u64* part = (const u64*)&s;
    for (size_t i = 0; i < sizeof(Stats) / sizeof(u64); i++) sum[i] += part[i];
}
}  // namespace

extern "C" {
#define X(name) #name " "
const char* emu_opcodes() { return OPCODES(X); }
const char* emu_types() { return TYPES(X); }
const char* emu_statistics() { return STATISTICS(X); }
#undef X
void emu_configure(const Config* c) { machine.config = *c; }

void emu_add_program(const char* key, const char* name, const Instruction* instructions,
                     u32 num_instructions, const Operand* operands, u32 num_operands,
                     const char* text, const u32* param_offset, const u32* param_size,
                     u32 num_params, u32 param_bytes, u32 num_regs, u32 static_smem,
                     u32 local_bytes) {
    auto p = std::make_unique<Program>();
    p->name = name;
    p->instructions.assign(instructions, instructions + num_instructions);
    p->operands.assign(operands, operands + num_operands);
    p->param_offset.assign(param_offset, param_offset + num_params);
    p->param_size.assign(param_size, param_size + num_params);
    p->param_bytes = param_bytes;
    p->num_regs = num_regs;
    p->static_smem = static_smem;
    p->local_bytes = local_bytes;
    for (u32 i = 0; i < num_instructions; i++) {  // one line each
        const char* end = strchr(text, '\n');
        p->text.emplace_back(text, end ? end - text : strlen(text));
        text = end ? end + 1 : text + strlen(text);
    }
    programs[key] = std::move(p);
}

void emu_add_range(u64 address, u64 bytes) {
    u64& end = machine.ranges[address];
    end = std::max(end, address + bytes);
    machine.forget_last_range();
}
void emu_clear_ranges() {
    machine.ranges.clear();
    machine.forget_last_range();
}
void emu_add_module_range(u64 address, u64 bytes) {
    machine.module_ranges[address] = address + bytes;
}

const char* emu_last_error() { return last_error.c_str(); }
void emu_set_error(const char* text) { last_error = text; }
void emu_stats(u64* out) { memcpy(out, &total, sizeof total); }
int emu_num_stats() { return sizeof(Stats) / sizeof(u64); }
void emu_reset_stats() { total = Stats(); }
void emu_forget_launch() {
    // A fork may leave a launch of another thread in any state: leak it instead of destroying it.
    new (&machine.resident) decltype(machine.resident)();
    new (&machine.events) decltype(machine.events)();
    reset_machine();
}

int emu_launch(const char* key, const u32* grid, const u32* block, const u32* cluster,
               int explicit_cluster, u32 dynamic_smem, void** args) {
    try {
        auto it = programs.find(key);
        if (it == programs.end())
            fail(
                "kernel %s was never handed to the emulator: it was compiled while the emulator "
                "was not "
                "installed, or loaded from a cache without its PTX",
                key);
        Machine& m = machine;
        m.program = it->second.get();
        m.stats = Stats();
        for (int i = 0; i < 3; i++)
            m.grid[i] = grid[i], m.block[i] = block[i], m.cluster[i] = cluster[i];
        m.dynamic_smem = dynamic_smem;
        m.explicit_cluster = explicit_cluster;
        copy_params(*m.program, args);
        launch_guarded();
    } catch (const std::exception& e) {
        last_error = e.what() + position();
        reset_machine();
        return EMULATOR_FAILURE;
    }
    reset_machine();
    add_to_total(machine.stats);
    return 0;
}
}
