//! What the simulation of a pool cannot notice, and why: parts that it replaces or leaves out (ADR 0052), and
//! mechanisms without which nothing becomes wrong.

use super::Mechanism;

const FILES: &str = "files and devices are replaced";
const SOCKETS: &str = "sockets, frames and shared memory are replaced";
const IDENTITY: &str = "no certificates and no tokens are simulated";
const HAND_OFF: &str = "the hand-off has a simulation of its own, in handoff/tests";
const STORES: &str = "the metadata store is replaced";
const COST: &str = "it saves work or time: without it nothing becomes wrong";
const MISS: &str = "without it a block is missed, or evicted in vain: nothing becomes wrong";
const SIZE: &str = "no history is that large or that long";
const LOGS: &str = "nobody reads what processes log or show";
const CANCELLED: &str = "no operator of the simulation cancels a drain";
const REDUNDANT: &str = "another mechanism keeps the rule without it";
const ONE_MEDIUM: &str = "no node of the simulation has two media";
const EMPTIES: &str = "no operator of the simulation empties the medium of a node";
const ONE_THREAD: &str = "in one thread nobody looks while it happens";
const FIRST_COPY: &str = "it matters once in a load, for the records beside the first copy";
const BY_KEY: &str =
    "clients of the simulation remove blocks by key, and no namespace that is deleted comes back";
const ONE_POOL: &str = "all nodes of the simulation belong to one pool";
const TWICE: &str = "another mechanism keeps the rule too, unless two threads meet";

/// By the beginning of the mechanism's file.
const BY_FILE: &[(&str, &str)] = &[
    ("auth/", IDENTITY),
    ("disk/src/file.rs", FILES),
    ("disk/src/uring.rs", FILES),
    ("handoff/", HAND_OFF),
    ("transport/src/control.rs", SOCKETS),
    ("transport/src/frame.rs", SOCKETS),
    ("transport/src/gpu", "no GPU is simulated"),
    ("transport/src/handshake.rs", SOCKETS),
    ("transport/src/peer/", HAND_OFF),
    ("transport/src/service", SOCKETS),
    ("transport/src/shm/", SOCKETS),
    ("transport/src/socket.rs", SOCKETS),
    ("transport/src/tcp/", SOCKETS),
    ("transport/src/wire.rs", SOCKETS),
    ("types/src/wire/frame.rs", SOCKETS),
    ("store-node/src/fence/boards.rs", SOCKETS),
    ("store-node/src/node.rs", SOCKETS),
    ("tls/", IDENTITY),
    ("etcd/", STORES),
    ("daemon/", IDENTITY),
    ("cli/", IDENTITY),
    ("master/src/service/rights", IDENTITY),
    ("master/src/service/framed/", SOCKETS),
    ("master/src/service/nodes.rs", IDENTITY),
    ("master/src/service/passing.rs", IDENTITY),
    ("client/src/dialer.rs", IDENTITY),
    ("client/src/links.rs", IDENTITY),
    ("client/src/control/framed.rs", SOCKETS),
    (
        "client/src/overlap.rs",
        "no client of the simulation gives buffers that overlap",
    ),
    (
        "client/src/blocking.rs",
        "the client of plain threads is left out",
    ),
    ("master/src/store/embedded/", STORES),
    ("master/src/store/etcd/", STORES),
    ("seams/", "time is replaced"),
    (
        "master/src/store/record/decode.rs",
        "all processes have one version",
    ),
    ("master/src/tenant", "no rates are simulated"),
    ("master/src/directory/orders.rs", COST),
    ("master/src/pool/put_queue.rs", COST),
    ("master/src/pool/silence.rs", MISS),
];

/// By what the mechanism is.
const BY_WHAT: &[(&str, &[&str])] = &[
    (
        COST,
        &[
            "whole pages begin at a page where a free range has room",
            "a zone whose copies cannot leave pauses",
            "a lookup loads nothing while a replacement commits",
            "a copy that is longer than its node's memory is no reason to wait",
            "a lookup whose caller has gone ends its leases",
            "a message begins few loads on the session's thread",
            "a node hears that its medium is refused",
            "a node that stops waits for no medium that its master refuses",
            "a source that hangs leaves a worker to others",
            "the end of a pull wakes a worker that waits with orders in the queue",
            "no block is loaded while the log has no room",
            "a leaf that gives no room does not keep its ancestors",
            "the need of a lookup stands once",
            "a load that failed needs no mention",
            "a node out of service asks again when it stops",
            "a drain ends when its medium takes no more stores",
            "a drain whose media take no stores waits for no load",
            "a drain to media waits for no load",
            "a node whose blocks did not move is told when its slow medium has answered",
            "a pull that failed reads another replica",
            "waits of a block are no failed pulls",
            "a copy that was dropped is written again only if its block was used",
            "a drain ends when its medium holds what was used last",
            "a put waits for room that is being fenced, and evicts no neighbours for it",
            "what lies on a node that takes no blocks is met once",
            "a round stops at its goal",
            "a source sends no more than the bandwidth of replicas",
            "a put takes the place of its own grant whose write failed",
            "what was refused beside grants is asked for at once",
            "a get gives its lease back",
            "a known namespace is found without a lock",
            "a load is recorded when the journal has made its record durable",
            "equal candidates leave the heap together",
            "a namespace without blocks is put in order without a walk",
            "a batch goes on at the end of any other writer",
            "turns follow what eviction reaches",
            "with policy prefix every block has its turn once most of memory is used",
            "a block that comes back makes its room in a full memory",
            "stores are ordered without a walk over all blocks",
            "a master that speaks is not silent",
            "verifications take turns, and end with their session",
            "a lookup works no longer than its caller waits",
            "a load of whole granules takes arena memory for its header only",
            "a lookup is woken by the end of its last load",
            "a lookup that was woken counts its loads again",
            "a lookup waits for no load that began after the end of its own",
            "a deletion has a lock of its own",
            "the search for a run begins where shares allow one",
            "a block that no quota takes fails for good",
            "a put that waits for its quota makes few passes",
            "the evictor looks again soon while a put waits for its quota",
            "a copy that is recorded after its zone was left was not used since",
            "no more bytes move between zones than new copies have",
            "a line keeps its longest length when it begins anew",
            "a zone of a large medium has room for the headers of its blocks",
            "an eighth of each zone is for new copies",
            "pinned copies that fill a medium are not written for ever",
            "a pinned block whose copies do not fit waits for its turn",
            "a drain moves no block of the next incarnation",
            "a cancelled task tells why its blocks waited",
            "a move ends where its replica is once its node is back",
            "a pinned copy that fits in no zone is loaded where the node with its block leaves",
            "no block is loaded while appends wait for space",
            "a put that is slower than its node's drain ends",
            "attachments of media have threads of their own",
            "a repeated commit succeeds while its block is on a medium",
            "a pinned block that is being copied gets no second copy",
        ],
    ),
    (
        MISS,
        &[
            "a slow log makes no extent stuck",
            "a background round takes nothing used later than the blocks that a drain copies",
            "no room is made for a move whose source has no session",
            "a load that failed for another reason leaves its copy readable",
            "a range that failed has a bad sector only if later reads succeed",
            "a store that failed is tried once more",
            "what an earlier session of a medium left open ends with its next offer",
            "a key that left a lease in a renewal that failed is counted",
            "an attachment waits for room in a full store",
            "a drain makes no silent node readable",
            "a node that says that it drains was heard",
            "a location is remembered no longer than its lease",
            "a node gets time to return once until it is heard",
            "a node that was silent before its master was cut off gets no time to return",
            "a node whose session ended before its silence gets no time to return",
            "a node has time for a new session from the end of its last one",
            "a master that hears nobody drops no node",
            "a replica that was found right is not hidden again at once",
            "a hidden replica hides no other block at its place",
            "a block that is evicted while it is copied keeps its copy",
            "a block that was used after stores were ordered ends an eviction",
            "a later block of a namespace with settings ends an eviction",
            "a run has no block that was used after stores were ordered",
            "a run is priced by the ages of the blocks that are there",
            "the log says which places have no lease any more",
            "the log says which places removed blocks left without a lease",
            "a load opens what was left without a lease also when the system's snapshot says so",
            "a copy that was used since its zone was written moves on",
            "a stopping node copies the blocks that were used last first",
            "blocks whose copies are lost get others",
            "a draining node serves the blocks on its media",
            "a lease on a copy is renewed on the medium",
            "a load that goes on when its caller has to go is not given up",
            "the end of a load leases the block for the lookups that wait",
            "blocks that wait for room count below the quota",
            "only a lookup that waits asks for room below its quota",
            "no room is made for a block that no quota takes",
            "a run of neighbours is judged as a whole",
            "a run of neighbours takes blocks above a soft quota first",
            "who ends loads does not wait for their room",
            "a block that moves on a medium keeps its room",
            "the arena takes every block that a zone takes",
            "a pinned block has its turn at once",
            "a queue remembers that it dropped pinned blocks",
            "a walk keeps the blocks that were set aside meanwhile",
            "pinned blocks that a queue dropped are queued again",
            "a pinned block waits for the write budget",
            "a pinned block waits for the quota of media",
            "pinned blocks at a quota delay none of another namespace",
            "a pinned block is admitted while any budget is left",
            "a pinned block in memory gets another copy when its zone is emptied",
            "the copy of a pinned block in memory moves with its zone",
            "a pinned block is stored when no other put of its key is open",
            "a pinned block whose store was not recorded is stored again",
            "a lease on a copy moves only to memory on a node that stays",
            "a copy leaves its zone after its load",
            "a copy whose move failed moves later",
            "a copy whose move the log refused moves later",
            "loads on a node that drains get the room of blocks that were set aside",
            "a load on a node that drains finds a piece that lies across two steps of its search",
            "another replica of a block voids no store of it",
            "a second copy of a block does not replace a copy that stays",
            "a copy whose record is on its way to the log is a copy that stays",
            "a move between zones replaces no copy that stays elsewhere",
            "the blocks of a medium that is gone are copied again",
        ],
    ),
    (
        SIZE,
        &[
            "a pattern has a length",
            "the zones of a medium have a number",
            "the media of a node have a number",
            "writes over the client's cap on a node take turns",
            "a late write is not held back again",
            "a standby forgets what the log no longer holds",
            "the copies on a medium that is absent for long do not count",
            "a master that did not run counts silence anew",
            "copies on a medium that cannot be attached count no longer",
        ],
    ),
    (
        ONE_THREAD,
        &[
            "a stop moves what the task of a cancelled drain left",
            "a count of blocks is no answer to a report that came after it",
            "a drain fails if its node leaves while its blocks are listed",
            "the record of an eviction names the places that the block left",
            "a standby takes a block out of the places that it left alone",
            "a load takes a block out of the places that it left alone",
            "a state that is gone is no snapshot",
            "the journal's own thread ends its runtime",
            "a block whose replicas change is counted all the while",
            "a walk leaves the line of a drain",
            "a removal takes a block that came back in another slot",
            "a node that speaks while its drain begins drains",
            "a medium that came back meanwhile is not dropped",
            "a medium is not dropped while it is offered",
            "a store that ends while its block is evicted waits for the evictor's note",
            "a transfer begins in the session of its medium alone",
            "the leases of a swept block are noted before a load brings it back",
            "stores are ordered when no block is between the directory and its line",
            "a block's own put keeps no copy from the log",
            "a copy that moves keeps its old place until it has the new one",
            "a block that came back to a segment that is gone has left its place",
            "no node is told that its blocks have their copies before the walk over them has ended",
            "the walk of a drain keeps the blocks that came meanwhile",
            "a copy whose zone is emptied meanwhile is no copy that stays",
            "a lookup that comes while a load ends gets a lease too",
        ],
    ),
    (
        TWICE,
        &[
            // The lists of leased places in snapshots name the same places.
            "a load keeps shut what the log says was left under leases",
            "a standby shuts what left under leases and what its snapshot lacked",
            // Each term has keys of its own, so no proof of another term is valid.
            "a node refuses grants of another epoch",
            // No write begins where the read goes on.
            "a read ends with its term",
        ],
    ),
    (
        FILES,
        &[
            "a node refuses a medium beside its copy",
            "a disk is found by its medium without its lock",
            "an attachment of a medium has a deadline",
            "a superblock is read again when no request is in flight",
            "the end of a medium reads nothing again",
            "memory that the kernel may still write keeps its guard",
            "a read of superblocks has a deadline",
        ],
    ),
    (
        LOGS,
        &[
            "a leader keeps the list of unused media of a session",
            "a key writes no line of its own into a log",
            "a replica that left before its re-verification does not count as damaged",
            "the alert of a drained node that stops does not ask the operator to take it back",
            "the alert of a draining node that stops asks for no other drain",
            "the alert of a draining node does not say that other nodes are full",
        ],
    ),
    (
        IDENTITY,
        &[
            "a node judges the token of a hello",
            "a strict node keeps its memory to callers of every namespace",
            "a put goes to another node where a certificate is refused",
        ],
    ),
    (
        SOCKETS,
        &[
            "a node fences nothing that a process holds or views",
            "a connection of headers alone has a limit of calls",
            "a node fences nothing that a view has pinned on a board",
            "the puts of a client that is gone end",
            "no lease lingers beyond a change by its own client",
            "the time to connect to a master bounds no lookup",
        ],
    ),
    (
        REDUNDANT,
        &[
            // The publication of a pull keeps the source of a move whose target leaves.
            "no block moves to a node that leaves meanwhile",
            // No zone is emptied before the moves of its copies are recorded.
            "the record of a copy that leaves with its zone names its place",
            // Records become durable in the order of the log. Between the last one of an earlier session and the one
            // that the next session waits for, no copy moves and no zone is emptied.
            "a record of an earlier session does not empty a zone in the next one",
            // A leader grants a place only once the log has the record with which its block left. So the next commit
            // there is in a later group.
            "a standby publishes a block that comes back before the next commit takes its place",
        ],
    ),
    (
        BY_KEY,
        &["a removal without keys waits until earlier losses are logged"],
    ),
    (
        FIRST_COPY,
        &[
            // Behind the first copy a lower version ends the batch, so the last version is the highest. Before it no
            // block comes back. A batch with records of both sides needs a block with a copy that comes back while
            // memory has it still. This must happen just after the late commit of a lower version.
            "the last commit of a block that came back counts in a load",
        ],
    ),
    (
        ONE_MEDIUM,
        &[
            "the blocks of a medium that is gone wait for a slow one",
            "a block that only a slow medium takes waits for it",
            "a busy medium stops no stores on other media",
            "pinned blocks that wait for one medium let those of another go first",
            "a moved block that waits for one medium lets those for another go first",
            "many moved blocks that wait for one medium let those for another go first",
            "a drain begins again when a medium of its node is gone",
            "a drain waits for stores on a medium that has become slow",
            // A node offers its only medium when no request is in flight. So its state changes after its record.
            "a medium has the state that its node told last",
        ],
    ),
    (
        EMPTIES,
        &[
            "a block that moved off a medium is stored on another one at once",
            "an old block that moves off a medium gets room in memory on its way",
            "no copy that was used later is dropped for a block that moves off a medium",
            "a load of a drain is no use of its block",
            "a task runs while its blocks are still to be loaded from media",
            "a cancelled drain loads no more blocks from media",
            "only the media of a node that an operator drains are emptied",
            "a node whose media leave is drained once no block is only on them",
            "blocks in memory get other copies when a medium leaves for good",
            "the tasks of one drain scan all blocks for other copies once",
            "a report that media leave gets blocks in memory other copies",
            "copies on media that leave do not count under a leader that only heard of it",
            "a walk keeps the turn of blocks that moved off media",
            "a node tells each leader that its media leave",
            "a cancelled drain forgets that the media leave",
            "loads on a node whose media are emptied take the room of blocks with copies",
            "a node that stops does not wait until its media are empty",
            "no copy is given up for a block that only passes through memory",
            "a block that moves to a medium waits for its write budget",
            "a move off media says that the media leave",
            "a drain whose media come back ends the moves off them",
            "a node that stops waits for no block that is only on media",
            "a move off media voids the count of the blocks that are left",
            "a node is told again that its media leave when its report comes after the order",
            "a report that media leave is not of a cancelled drain",
            "blocks that have left memory wait for no store at once",
            "the blocks of a node that wait for stores at once have a bound",
            "a block that moves to a draining node is in the queue of the drain",
            "a move off media whose answer is lost is repeated",
            "a pinned block goes before blocks that moved off media",
        ],
    ),
    (
        ONE_POOL,
        &[
            "an attached medium is not offered to another pool",
            "a medium of another pool is not formatted",
            "an offer to an earlier session detaches no medium",
        ],
    ),
    (
        CANCELLED,
        &[
            "a node that speaks while its drain is cancelled is live",
            "a node that stops is not taken back into service",
            "a node that has not heard of a cancellation begins no drain",
            "a cancellation is repeated in the next session",
            "a node is not told to leave after its drain was cancelled",
            "a drain that was cancelled moves nothing",
            "a put goes on when the drain of its node is cancelled",
            "a cancelled drain ends its tasks",
            "a cancellation ends once the node has confirmed it",
            "whoever waits for a cancelled drain does not begin it again",
            "the line of a cancelled drain ends",
            "a late step of a cancelled drain begins no line",
            "a node that is taken back forgets its drain",
            "a node that is taken back announces its next drain",
            "the word of a cancelled drain is no answer to a stop",
            "a repeated cancellation tells of a drain that ends only now",
            "a node that stops waits for no cancelled task",
            "a stop moves what a task leaves that an operator's call cancels",
            "a late word of an earlier session begins no drain",
            "no leader judges the drain of a node that it has not heard",
            "the line of a stop outlasts the end of the cancelled drain before it",
            "a cancelled drain leaves no line that nobody shortens",
            "a repeated cancellation counts as one",
        ],
    ),
];

/// Why the simulation cannot notice that the mechanism is off; `None` where it could.
pub(super) fn out_of_reach(mechanism: &Mechanism) -> Option<&'static str> {
    let mut by_file = BY_FILE.iter();
    let by_file = by_file.find(|(file, _)| mechanism.file.starts_with(file));
    let mut by_what = BY_WHAT.iter();
    let by_what = by_what.find(|(_, all)| all.contains(&mechanism.what));
    let reason = by_file.map(|(_, reason)| *reason);
    reason.or_else(|| by_what.map(|(reason, _)| *reason))
}

#[cfg(test)]
mod tests {
    use super::super::MECHANISMS;
    use super::*;

    #[test]
    fn every_reason_is_one_of_a_mechanism() {
        let all = || MECHANISMS.into_iter().flatten();
        for (file, _) in BY_FILE {
            assert!(all().any(|one| one.file.starts_with(file)), "{file}");
        }
        for what in BY_WHAT.iter().flat_map(|(_, all)| *all) {
            assert!(all().any(|one| one.what == *what), "{what}");
        }
    }
}
