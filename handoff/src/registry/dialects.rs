//! The four HTTP dialects over one registry.

use super::json::Fields;
use super::{BootstrapRegistry, HttpReply, PrefillShape, RankAddress, RankCounts, RankPlace};
use crate::Moment;
use crate::room::RoomId;
use serde_json::{Map, Value, json};

type Answer = Result<HttpReply, HttpReply>;

/// The longest address or name of a rank, in bytes. Any process that reaches the port may register ranks, and
/// the registry keeps each of them.
const MAX_NAME: usize = 1024;

/// The fields that SGLang's decode reads back as prefill sent them. Each has the value for a prefill that did
/// not send it.
const TOLD: [(&str, Value); 3] = [
    ("kv_cache_dtype", Value::Null),
    ("prefill_http_port", Value::Null),
    ("decode_allocation_policy", Value::Null),
];
/// Fields of the same kind, left out when prefill did not send them.
const TOLD_IF_PRESENT: [&str; 2] = ["kv_layout", "dsv41_spec_layout"];
/// Fields of the same kind, as flags.
const TOLD_FLAGS: [&str; 2] = ["enable_dsa_cache_layer_split", "enable_kv_cache_sharding"];

impl BootstrapRegistry {
    pub(super) fn put_route(&mut self, body: &[u8]) -> Answer {
        let fields = Fields::of_body(body)?;
        let address = address(&fields)?;
        let role = match fields.get("role") {
            Some(_) => fields.text("role")?.to_lowercase(),
            None => "prefill".to_owned(),
        };
        match role.as_str() {
            "prefill" => {}
            // Nothing looks up a rank of decode: prefill learns its address from the offer.
            "decode" => return Ok(HttpReply::text(200, "OK")),
            _ => return Err(HttpReply::text(400, "role must be Prefill or Decode")),
        }
        if fields.has("engine_rank") && !fields.has("page_size") {
            return self.put_numbered(fields.rank("engine_rank")?, address);
        }
        let (place, shape) = described(&fields)?;
        self.put_place(place, shape, address)
    }

    fn put_numbered(&mut self, rank: u32, address: RankAddress) -> Answer {
        if !self.numbered.contains_key(&rank) {
            self.has_room_for_rank()?;
        }
        self.numbered.insert(rank, address);
        Ok(HttpReply::text(200, "OK"))
    }

    fn put_place(&mut self, place: RankPlace, shape: PrefillShape, address: RankAddress) -> Answer {
        if !shape.counts.has(place) {
            return Err(HttpReply::text(
                400,
                "a rank is not below its number of ranks",
            ));
        }
        // A prefill that consists of this rank alone may restart with another page size.
        let is_alone = self.ranks.keys().all(|known| *known == place);
        if let Some(known) = self.shape.as_ref().filter(|_| !is_alone) {
            if known.page_size != shape.page_size {
                let text = format!(
                    "page_size {} differs from the other ranks' {}",
                    shape.page_size, known.page_size
                );
                return Err(HttpReply::text(400, text));
            }
            if known.counts != shape.counts {
                let text = "the numbers of ranks differ from the other ranks'";
                return Err(HttpReply::text(400, text));
            }
            for name in ["decode_allocation_policy", "dsv41_spec_layout"] {
                if known.told.get(name) != shape.told.get(name) {
                    let text = format!("{name} differs from the other ranks'");
                    return Err(HttpReply::text(400, text));
                }
            }
        }
        if !self.ranks.contains_key(&place) {
            self.has_room_for_rank()?;
        }
        if is_alone {
            self.shape = Some(shape);
        }
        self.ranks.insert(place, address);
        Ok(HttpReply::text(200, "OK"))
    }

    pub(super) fn get_route(&self, query: &str) -> Answer {
        let fields = Fields::of_query(query);
        if fields.has("prefill_dp_rank") || fields.has("target_tp_rank") {
            return self.sglang_route(&fields);
        }
        let rank = fields.number("engine_rank")?;
        if !fields.has("target_dp_group") {
            let rank = u32::try_from(rank).ok();
            let address = rank.and_then(|rank| self.numbered.get(&rank));
            return address.map(answer).ok_or_else(not_found);
        }
        let group = fields.number("target_dp_group")?;
        let stage = match fields.get("target_pp_rank") {
            Some(_) => fields.number("target_pp_rank")?,
            None => 0,
        };
        if rank == -1 && group == -1 {
            let shape = self.shape.as_ref().ok_or_else(|| self.incomplete())?;
            return Ok(HttpReply::json(&json!({
                "prefill_attn_tp_size": shape.counts.tp,
                "prefill_tp_size": shape.counts.tp,
                "prefill_dp_size": shape.counts.dp,
                "prefill_pp_size": shape.counts.pp,
                "prefill_page_size": shape.page_size,
            })));
        }
        self.place(group, 0, rank, stage)
    }

    fn sglang_route(&self, fields: &Fields) -> Answer {
        let asked = [
            "prefill_dp_rank",
            "prefill_cp_rank",
            "target_tp_rank",
            "target_pp_rank",
        ];
        let [dp, cp, tp, pp] = asked.map(|name| fields.number(name));
        let asked = [dp?, cp?, tp?, pp?];
        let shape = self.shape.as_ref().filter(|_| self.is_complete());
        let shape = shape.ok_or_else(|| self.incomplete())?;
        if asked == [-1; 4] {
            return Ok(HttpReply::json(&sglang_info(shape)));
        }
        let [dp, cp, tp, pp] = asked;
        self.place(dp, cp, tp, pp)
    }

    fn place(&self, dp: i64, cp: i64, tp: i64, pp: i64) -> Answer {
        let rank = |of: i64| u32::try_from(of).map_err(|_| not_found());
        let place = RankPlace {
            dp: rank(dp)?,
            cp: rank(cp)?,
            tp: rank(tp)?,
            pp: rank(pp)?,
        };
        self.ranks.get(&place).map(answer).ok_or_else(not_found)
    }

    fn incomplete(&self) -> HttpReply {
        let count = self.ranks.len();
        HttpReply::text(
            503,
            format!("{count} ranks of prefill are registered, not all"),
        )
    }

    pub(super) fn register_dp_rank(&mut self, now: Moment, body: &[u8]) -> Answer {
        let fields = Fields::of_body(body)?;
        let (room, rank) = (fields.room("bootstrap_room")?, fields.rank("dp_rank")?);
        self.set_dp_rank(now, RoomId(room), rank);
        Ok(HttpReply::text(200, "OK"))
    }

    pub(super) fn query_dp_ranks(&self, now: Moment, body: &[u8]) -> Answer {
        let rooms = Fields::of_body(body)?.rooms("bootstrap_rooms")?;
        let known = rooms.into_iter().filter_map(|room| {
            let rank = self.dp_rank(now, RoomId(room))?;
            Some((room.to_string(), Value::from(rank)))
        });
        Ok(HttpReply::json(&Value::Object(known.collect())))
    }

    pub(super) fn register_vllm(&mut self, body: &[u8]) -> Answer {
        let fields = Fields::of_body(body)?;
        let engine_id = fields.text("engine_id")?;
        let (dp, tp, pp) = (
            fields.rank("dp_rank")?,
            fields.rank("tp_rank")?,
            fields.rank_or_zero("pp_rank")?,
        );
        let address = fields.get("addr").cloned();
        let address = address.ok_or_else(|| HttpReply::text(400, "addr is missing"))?;
        check_length("engine_id", engine_id.len())?;
        check_length("addr", address.to_string().len())?;
        let group = self.vllm.get(&dp);
        if group.is_some_and(|group| group.engine_id != engine_id) {
            let text = format!("dp_rank {dp} belongs to another engine_id");
            return Err(HttpReply::text(400, text));
        }
        let known = group.and_then(|group| group.workers.get(&(tp, pp)));
        if known.is_none() {
            self.has_room_for_rank()?;
        }
        let group = self.vllm.entry(dp).or_default();
        group.engine_id = engine_id;
        group.workers.insert((tp, pp), address);
        Ok(HttpReply::json(&json!({"status": "ok"})))
    }

    pub(super) fn query_vllm(&self) -> HttpReply {
        let mut groups = Map::new();
        for (dp, group) in &self.vllm {
            let mut ranks: Map<String, Value> = Map::new();
            for ((tp, pp), address) in &group.workers {
                let of_rank = ranks.entry(tp.to_string()).or_insert_with(|| json!({}));
                if let Value::Object(stages) = of_rank {
                    stages.insert(pp.to_string(), address.clone());
                }
            }
            let entry = json!({"engine_id": group.engine_id, "worker_addr": ranks});
            groups.insert(dp.to_string(), entry);
        }
        HttpReply::json(&Value::Object(groups))
    }
}

fn address(fields: &Fields) -> Result<RankAddress, HttpReply> {
    let port = fields.number("rank_port")?;
    let port = u16::try_from(port).ok().filter(|port| *port > 0);
    let ip = fields.text("rank_ip")?;
    check_length("rank_ip", ip.len())?;
    Ok(RankAddress {
        ip,
        port: port.ok_or_else(|| HttpReply::text(400, "rank_port must be a port"))?,
    })
}

fn check_length(name: &str, bytes: usize) -> Result<(), HttpReply> {
    match bytes <= MAX_NAME {
        true => Ok(()),
        false => Err(HttpReply::text(
            400,
            format!("{name} has at most {MAX_NAME} bytes"),
        )),
    }
}

fn answer(address: &RankAddress) -> HttpReply {
    HttpReply::json(&json!({"rank_ip": address.ip, "rank_port": address.port}))
}

fn not_found() -> HttpReply {
    HttpReply::text(404, "no such rank of prefill is registered")
}

/// The numbers of a rank, and the settings that all ranks share. SGLang's names come first. The documents'
/// names are the same without `attn_` and `system_`.
fn described(fields: &Fields) -> Result<(RankPlace, PrefillShape), HttpReply> {
    let rank = |name: &str, short: &str| fields.rank_or_zero(fields.either(name, short));
    let count = |name: &str, short: &str| fields.count(fields.either(name, short));
    let (system, attention) = (
        fields.count("system_dp_size")?,
        count("attn_dp_size", "dp_size")?,
    );
    // Data parallelism is of the system, or else of attention within one system.
    let (dp_size, dp) = match system {
        1 => (attention, rank("attn_dp_rank", "dp_rank")?),
        _ => (system, fields.rank("system_dp_rank")?),
    };
    let tp_rank = match fields.get("engine_rank") {
        Some(_) => fields.rank("engine_rank")?,
        None => rank("attn_tp_rank", "tp_rank")?,
    };
    let page_size = fields.room("page_size")?;
    if page_size == 0 {
        return Err(HttpReply::text(400, "page_size must be 1 or more"));
    }
    let mut told = Map::new();
    let names = TOLD.iter().map(|(name, _)| *name);
    let names = names.chain(TOLD_IF_PRESENT).chain(TOLD_FLAGS);
    for name in names.chain(["load_balance_method"]) {
        if let Some(value) = fields.get(name) {
            told.insert(name.to_owned(), value.clone());
        }
    }
    let place = RankPlace {
        dp,
        cp: rank("attn_cp_rank", "cp_rank")?,
        tp: tp_rank,
        pp: fields.rank_or_zero("pp_rank")?,
    };
    let counts = RankCounts {
        dp: dp_size,
        cp: count("attn_cp_size", "cp_size")?,
        tp: count("attn_tp_size", "tp_size")?,
        pp: fields.count("pp_size")?,
    };
    let shape = PrefillShape {
        counts,
        page_size,
        told,
    };
    Ok((place, shape))
}

fn sglang_info(shape: &PrefillShape) -> Value {
    let told = |name: &str| shape.told.get(name);
    let mut info = Map::new();
    let counts = shape.counts;
    for (name, count) in [
        ("attn_tp_size", counts.tp),
        ("attn_cp_size", counts.cp),
        ("dp_size", counts.dp),
        ("pp_size", counts.pp),
    ] {
        info.insert(name.to_owned(), count.into());
    }
    info.insert("page_size".to_owned(), shape.page_size.into());
    for (name, absent) in TOLD {
        let value = told(name).cloned().unwrap_or(absent);
        info.insert(name.to_owned(), value);
    }
    if told("decode_allocation_policy").is_none() {
        info.insert("decode_allocation_policy".to_owned(), "early".into());
    }
    for name in TOLD_IF_PRESENT {
        if let Some(value) = told(name) {
            info.insert(name.to_owned(), value.clone());
        }
    }
    for name in TOLD_FLAGS {
        let is_set = told(name).and_then(Value::as_bool).unwrap_or(false);
        info.insert(name.to_owned(), is_set.into());
    }
    let method = told("load_balance_method").and_then(Value::as_str);
    let follows = method.is_none_or(|method| method == "follow_bootstrap_room");
    info.insert("follow_bootstrap_room".to_owned(), follows.into());
    Value::Object(info)
}
