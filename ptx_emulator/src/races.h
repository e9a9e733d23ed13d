// Data races by happens-before: see races.cpp.
#pragma once
#include "machine.h"

enum AgentKind : u32 { WARP_AGENT, LOAD_AGENT, STORE_AGENT, WGMMA_AGENT };

extern bool races_on;
extern const Actor* acting;  // the current asynchronous operation, or null
struct ActingScope {         // makes an actor the current one
    explicit ActingScope(const Actor& a) { acting = races_on ? &a : nullptr; }
    ~ActingScope() { acting = nullptr; }
};

void races_setup(Cluster* cluster);
u32 agent_of(const Warp& w, AgentKind kind);
Actor warp_actor(const Warp& w);
Actor issue_async(Warp& w, AgentKind kind);  // a new asynchronous operation of this warp
Actor issue_tensor(Warp& w);                 // the next tensor-core operation, issued by this warp
void race_shared(CTA* c, u32 offset, u32 bytes, bool write, const Actor& by);
void race_shared(Warp& w, u32 address, u32 bytes, bool write);
void race_tmem(CTA* c, u32 column, u32 columns, int quarter, bool write,
               const Actor& by);  // quarter -1: all four
void race_release(Warp& w, SyncClock& s);
void race_acquire(Warp& w, const SyncClock& s);
void race_complete(SyncClock& s);
void race_join(Clock& into, const Clock& from);
