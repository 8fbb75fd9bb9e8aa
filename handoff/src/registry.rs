//! The bootstrap registry: where the ranks of prefill are (rows S2, C7, C8).
//!
//! ```text
//!  HttpRequest ──► dialect (by path, query and body) ──► BootstrapRegistry ──► HttpReply
//!     PUT, GET /route        documents', chitu's, SGLang's
//!     POST /register_dp_rank, /query_dp_ranks    SGLang's
//!     POST /register, GET /query                 vLLM's
//!     GET /health
//! ```
//!
//! - `dialects`: the field names of each dialect
//! - `json`: fields of a JSON body or of a query
//!
//! A registration is idempotent: a rank that registers again, at the same or another address, takes
//! its own place. A rank whose page size differs from the other ranks' is refused.

mod dialects;
mod json;
#[cfg(test)]
mod tests;

use crate::Moment;
use crate::room::RoomId;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use uuid::Uuid;

/// The bounds of a registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistryOptions {
    /// The most ranks of all dialects together.
    pub max_ranks: usize,
    /// The most rooms whose data-parallel rank is kept.
    pub max_rooms: usize,
    /// How long the registry keeps the data-parallel rank of a room.
    pub room_ttl: Duration,
    /// The longest body, in bytes.
    pub max_body: usize,
}

impl Default for RegistryOptions {
    fn default() -> Self {
        Self {
            max_ranks: 65_536,
            max_rooms: 65_536,
            room_ttl: Duration::from_secs(120),
            max_body: 64 << 10,
        }
    }
}

/// A request to the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpRequest<'a> {
    /// `GET`, `PUT` or `POST`.
    pub method: &'a str,
    /// The path, without the query.
    pub path: &'a str,
    /// The query, without the question mark. Its values are numbers, so nothing is escaped.
    pub query: &'a str,
    /// The body.
    pub body: &'a [u8],
}

/// The registry's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpReply {
    /// The status.
    pub status: u16,
    /// Whether the body is JSON. Otherwise it is text.
    pub is_json: bool,
    /// The body.
    pub body: String,
}

impl HttpReply {
    fn text(status: u16, body: impl Into<String>) -> Self {
        Self {
            status,
            is_json: false,
            body: body.into(),
        }
    }

    fn json(body: &serde_json::Value) -> Self {
        Self {
            status: 200,
            is_json: true,
            body: body.to_string(),
        }
    }
}

/// The place of a rank of prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RankPlace {
    dp: u32,
    cp: u32,
    tp: u32,
    pp: u32,
}

/// The address of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RankAddress {
    ip: String,
    port: u16,
}

/// The numbers of ranks of prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RankCounts {
    dp: u32,
    cp: u32,
    tp: u32,
    pp: u32,
}

impl RankCounts {
    fn all(self) -> u64 {
        [self.dp, self.cp, self.tp, self.pp]
            .into_iter()
            .map(u64::from)
            .fold(1, u64::saturating_mul)
    }

    fn has(self, place: RankPlace) -> bool {
        place.dp < self.dp && place.cp < self.cp && place.tp < self.tp && place.pp < self.pp
    }
}

/// The settings that all ranks of prefill share, as the first rank registered them.
#[derive(Clone, Debug, PartialEq)]
struct PrefillShape {
    counts: RankCounts,
    page_size: u64,
    /// The fields that SGLang's decode reads back.
    told: serde_json::Map<String, serde_json::Value>,
}

/// A data-parallel group of vLLM's dialect.
#[derive(Clone, Debug, Default)]
struct VllmGroup {
    engine_id: String,
    workers: BTreeMap<(u32, u32), serde_json::Value>,
}

/// The addresses of the ranks of one prefill instance.
#[derive(Clone, Debug)]
pub struct BootstrapRegistry {
    options: RegistryOptions,
    shape: Option<PrefillShape>,
    ranks: BTreeMap<RankPlace, RankAddress>,
    /// Ranks that registered only a number (chitu's dialect).
    numbered: BTreeMap<u32, RankAddress>,
    vllm: BTreeMap<u32, VllmGroup>,
    rooms: BTreeMap<RoomId, (u32, Moment)>,
    room_order: VecDeque<(RoomId, Moment)>,
}

impl BootstrapRegistry {
    /// An empty registry.
    pub const fn new(options: RegistryOptions) -> Self {
        Self {
            options,
            shape: None,
            ranks: BTreeMap::new(),
            numbered: BTreeMap::new(),
            vllm: BTreeMap::new(),
            rooms: BTreeMap::new(),
            room_order: VecDeque::new(),
        }
    }

    /// Answers a request in the dialect of the request.
    pub fn handle(&mut self, now: Moment, request: &HttpRequest<'_>) -> HttpReply {
        if request.body.len() > self.options.max_body {
            let limit = self.options.max_body;
            return HttpReply::text(413, format!("a body has at most {limit} bytes"));
        }
        let answer = match (request.method, request.path) {
            ("GET", "/health") => Ok(HttpReply::text(200, "OK")),
            ("PUT", "/route") => self.put_route(request.body),
            ("GET", "/route") => self.get_route(request.query),
            ("POST", "/register_dp_rank") => self.register_dp_rank(now, request.body),
            ("POST", "/query_dp_ranks") => self.query_dp_ranks(now, request.body),
            ("POST", "/register") => self.register_vllm(request.body),
            ("GET", "/query") => Ok(self.query_vllm()),
            (
                _,
                "/health" | "/route" | "/register_dp_rank" | "/query_dp_ranks" | "/register"
                | "/query",
            ) => Err(HttpReply::text(405, "this path has another method")),
            _ => Err(HttpReply::text(404, "there is no such path")),
        };
        answer.unwrap_or_else(|refused| refused)
    }

    /// Whether every rank of prefill has registered.
    fn is_complete(&self) -> bool {
        let all = self.shape.as_ref().map(|shape| shape.counts.all());
        all.is_some_and(|all| self.ranks.len() as u64 >= all)
    }

    fn count(&self) -> usize {
        let of_vllm = self.vllm.values().map(|group| group.workers.len());
        self.ranks.len() + self.numbered.len() + of_vllm.sum::<usize>()
    }

    fn has_room_for_rank(&self) -> Result<(), HttpReply> {
        if self.count() < self.options.max_ranks {
            return Ok(());
        }
        let limit = self.options.max_ranks;
        Err(HttpReply::text(
            400,
            format!("{limit} ranks are registered already"),
        ))
    }

    /// Records the data-parallel rank of a room, and forgets the oldest rooms beyond the limits.
    fn set_dp_rank(&mut self, now: Moment, room: RoomId, rank: u32) {
        self.rooms.insert(room, (rank, now));
        self.room_order.push_back((room, now));
        while let Some((oldest, since)) = self.room_order.front().copied() {
            let is_old = now - since > self.options.room_ttl;
            if !is_old && self.room_order.len() <= self.options.max_rooms {
                break;
            }
            self.room_order.pop_front();
            // A room that was recorded again has a later entry.
            if self.rooms.get(&oldest).is_some_and(|(_, at)| *at == since) {
                self.rooms.remove(&oldest);
            }
        }
    }

    fn dp_rank(&self, now: Moment, room: RoomId) -> Option<u32> {
        let (rank, since) = self.rooms.get(&room)?;
        (now - *since <= self.options.room_ttl).then_some(*rank)
    }
}

/// The UUID of a request (row C8): the request's id if the id is a UUID, else the UUID of version 5 over the
/// id.
pub fn request_uuid(id: &str) -> Uuid {
    Uuid::try_parse(id).unwrap_or_else(|_| Uuid::new_v5(&Uuid::NAMESPACE_OID, id.as_bytes()))
}
