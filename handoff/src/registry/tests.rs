//! Rows S2, C7 and C8 in each dialect.

use super::*;
use serde_json::{Value, json};

fn registry() -> BootstrapRegistry {
    BootstrapRegistry::new(RegistryOptions::default())
}

fn ask(registry: &mut BootstrapRegistry, call: &str, body: &Value) -> (u16, Value) {
    ask_at(registry, Moment::default(), call, body)
}

fn ask_at(registry: &mut BootstrapRegistry, now: Moment, call: &str, body: &Value) -> (u16, Value) {
    let (method, target) = call.split_once(' ').unwrap();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let body = body.to_string();
    let request = HttpRequest {
        method,
        path,
        query,
        body: body.as_bytes(),
    };
    let reply = registry.handle(now, &request);
    let body = match reply.is_json {
        true => serde_json::from_str(&reply.body).unwrap(),
        false => Value::from(reply.body),
    };
    (reply.status, body)
}

fn rank(tp: u32, port: u16, page_size: u32) -> Value {
    json!({
        "role": "Prefill", "tp_size": 2, "tp_rank": tp, "dp_size": 1, "dp_rank": 0, "pp_size": 1,
        "pp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": port, "page_size": page_size,
    })
}

#[test]
fn s2_the_documents_dialect() {
    let mut registry = registry();
    let sizes = "GET /route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1";
    assert_eq!(ask(&mut registry, "GET /health", &Value::Null).0, 200);
    assert_eq!(ask(&mut registry, sizes, &Value::Null).0, 503);
    assert_eq!(ask(&mut registry, "PUT /route", &rank(0, 9000, 64)).0, 200);
    assert_eq!(ask(&mut registry, "PUT /route", &rank(1, 9001, 64)).0, 200);
    let (status, body) = ask(&mut registry, sizes, &Value::Null);
    assert_eq!((status, &body["prefill_attn_tp_size"]), (200, &json!(2)));
    assert_eq!(
        (&body["prefill_pp_size"], &body["prefill_page_size"]),
        (&json!(1), &json!(64))
    );
    let one = "GET /route?engine_rank=1&target_dp_group=0&target_pp_rank=0";
    let address = json!({"rank_ip": "10.0.0.1", "rank_port": 9001});
    assert_eq!(ask(&mut registry, one, &Value::Null), (200, address));
    let two = "GET /route?engine_rank=2&target_dp_group=0&target_pp_rank=0";
    assert_eq!(ask(&mut registry, two, &Value::Null).0, 404);
}

#[test]
fn s2_a_page_size_that_differs_is_refused_and_changes_nothing() {
    let mut registry = registry();
    ask(&mut registry, "PUT /route", &rank(0, 9000, 64));
    let (status, text) = ask(&mut registry, "PUT /route", &rank(1, 9001, 32));
    assert_eq!(
        (status, text.as_str().unwrap().contains("page_size")),
        (400, true)
    );
    let one = "GET /route?engine_rank=1&target_dp_group=0&target_pp_rank=0";
    assert_eq!(ask(&mut registry, one, &Value::Null).0, 404);
}

#[test]
fn c7_a_rank_that_registers_again_takes_its_own_place() {
    let mut registry = registry();
    for port in [9000, 9000, 9002] {
        assert_eq!(ask(&mut registry, "PUT /route", &rank(0, port, 64)).0, 200);
    }
    let zero = "GET /route?engine_rank=0&target_dp_group=0&target_pp_rank=0";
    assert_eq!(ask(&mut registry, zero, &Value::Null).1["rank_port"], 9002);
    assert!(!registry.is_complete(), "the second rank is still missing");
    // A prefill of one rank may restart with another page size.
    assert_eq!(ask(&mut registry, "PUT /route", &rank(0, 9000, 16)).0, 200);
}

#[test]
fn s2_the_dialect_of_chitu() {
    let mut registry = registry();
    let body = json!({
        "role": "Prefill", "rank_ip": "10.0.0.9", "rank_port": 8100, "engine_rank": 3,
    });
    assert_eq!(ask(&mut registry, "PUT /route", &body).0, 200);
    let address = json!({"rank_ip": "10.0.0.9", "rank_port": 8100});
    let (three, four) = ("GET /route?engine_rank=3", "GET /route?engine_rank=4");
    assert_eq!(ask(&mut registry, three, &Value::Null), (200, address));
    assert_eq!(ask(&mut registry, four, &Value::Null).0, 404);
}

fn sglang(tp: u32, dp: u32, policy: &str) -> Value {
    json!({
        "attn_tp_size": 2, "attn_tp_rank": tp, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0,
        "system_dp_size": 2, "system_dp_rank": dp, "rank_ip": "10.0.0.1",
        "rank_port": 7000 + 10 * dp + tp, "page_size": 64, "kv_cache_dtype": "auto",
        "load_balance_method": "round_robin", "decode_allocation_policy": policy,
    })
}

#[test]
fn s2_the_dialect_of_sglang_answers_503_until_all_ranks_are_there() {
    let mut registry = registry();
    let all =
        "GET /route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    let one = "GET /route?prefill_dp_rank=1&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0";
    for (tp, dp) in [(0, 0), (1, 0), (0, 1), (0, 1)] {
        assert_eq!(
            ask(&mut registry, "PUT /route", &sglang(tp, dp, "early")).0,
            200
        );
        assert_eq!(ask(&mut registry, all, &Value::Null).0, 503);
        assert_eq!(ask(&mut registry, one, &Value::Null).0, 503);
    }
    let odd = sglang(1, 1, "late");
    assert_eq!(ask(&mut registry, "PUT /route", &odd).0, 400);
    ask(&mut registry, "PUT /route", &sglang(1, 1, "early"));
    let info = json!({
        "attn_tp_size": 2, "attn_cp_size": 1, "dp_size": 2, "pp_size": 1, "page_size": 64,
        "kv_cache_dtype": "auto", "prefill_http_port": null, "decode_allocation_policy": "early",
        "enable_dsa_cache_layer_split": false, "enable_kv_cache_sharding": false,
        "follow_bootstrap_room": false,
    });
    assert_eq!(ask(&mut registry, all, &Value::Null), (200, info));
    let address = json!({"rank_ip": "10.0.0.1", "rank_port": 7011});
    assert_eq!(ask(&mut registry, one, &Value::Null), (200, address));
    let absent = "GET /route?prefill_dp_rank=9&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0";
    assert_eq!(ask(&mut registry, absent, &Value::Null).0, 404);
    let partial = "GET /route?prefill_dp_rank=1&target_tp_rank=1";
    assert_eq!(ask(&mut registry, partial, &Value::Null).0, 400);
}

#[test]
fn rooms_have_data_parallel_ranks_for_a_while() {
    let mut registry = registry();
    let room = u64::MAX - 3;
    let told = json!({"bootstrap_room": room, "dp_rank": 5});
    assert_eq!(ask(&mut registry, "POST /register_dp_rank", &told).0, 200);
    let rooms = json!({"bootstrap_rooms": [room, 17]});
    let known = json!({room.to_string(): 5});
    let asked = ask(&mut registry, "POST /query_dp_ranks", &rooms);
    assert_eq!(asked, (200, known));
    let later = Moment(Duration::from_secs(121));
    let forgotten = ask_at(&mut registry, later, "POST /query_dp_ranks", &rooms);
    assert_eq!(forgotten, (200, json!({})));
    for room in 0..100_000u64 {
        registry.set_dp_rank(later, RoomId(room), 0);
    }
    assert_eq!(registry.rooms.len(), 65_536, "rooms are bounded");
}

#[test]
fn s2_the_dialect_of_vllm() {
    let mut registry = registry();
    let worker = |engine: &str, tp: u32, port: u16| {
        json!({
            "engine_id": engine, "dp_rank": 0, "tp_rank": tp, "pp_rank": 0,
            "addr": format!("10.0.0.1:{port}"),
        })
    };
    for (tp, port) in [(0, 5000), (1, 5001), (1, 5001)] {
        let (status, body) = ask(&mut registry, "POST /register", &worker("a", tp, port));
        assert_eq!((status, body), (200, json!({"status": "ok"})));
    }
    assert_eq!(
        ask(&mut registry, "POST /register", &worker("b", 0, 5000)).0,
        400
    );
    let ranks = json!({"0": {"0": "10.0.0.1:5000"}, "1": {"0": "10.0.0.1:5001"}});
    let query = json!({"0": {"engine_id": "a", "worker_addr": ranks}});
    assert_eq!(ask(&mut registry, "GET /query", &Value::Null), (200, query));
}

#[test]
fn bad_requests_are_refused_by_name() {
    let mut registry = registry();
    let refused = |registry: &mut BootstrapRegistry, call: &str, body: Value| {
        let (status, text) = ask(registry, call, &body);
        (status, text.as_str().unwrap_or_default().to_owned())
    };
    let no_port = json!({"rank_ip": "a", "engine_rank": 0});
    let (status, text) = refused(&mut registry, "PUT /route", no_port);
    assert_eq!((status, text.as_str()), (400, "rank_port is missing"));
    let mut odd = rank(2, 9000, 64);
    assert_eq!(
        refused(&mut registry, "PUT /route", odd.clone()).0,
        400,
        "rank 2 of 2"
    );
    odd["tp_rank"] = json!(-1);
    assert_eq!(refused(&mut registry, "PUT /route", odd).0, 400);
    assert_eq!(refused(&mut registry, "PUT /route", json!([1])).0, 400);
    assert_eq!(refused(&mut registry, "POST /route", json!({})).0, 405);
    assert_eq!(refused(&mut registry, "GET /nowhere", json!({})).0, 404);
    assert_eq!(
        refused(&mut registry, "GET /route?engine_rank=x", json!({})).0,
        400
    );
    let huge = json!({"rank_ip": "x".repeat(70_000)});
    assert_eq!(refused(&mut registry, "PUT /route", huge).0, 413);
    assert_eq!(registry.count(), 0, "nothing was registered");
    let mut small = BootstrapRegistry::new(RegistryOptions {
        max_ranks: 1,
        ..RegistryOptions::default()
    });
    ask(&mut small, "PUT /route", &rank(0, 9000, 64));
    assert_eq!(refused(&mut small, "PUT /route", rank(1, 9001, 64)).0, 400);
}

/// Any process that reaches the port may register, and the registry keeps each registration.
#[test]
fn long_names_of_ranks_are_refused_in_every_dialect() {
    let mut registry = registry();
    let long = "x".repeat(1025);
    let refused = [
        (
            "PUT /route",
            json!({"rank_ip": long, "rank_port": 9000, "engine_rank": 0}),
        ),
        (
            "POST /register",
            json!({"engine_id": long, "dp_rank": 0, "tp_rank": 0, "addr": "10.0.0.1:5000"}),
        ),
        (
            "POST /register",
            json!({"engine_id": "a", "dp_rank": 0, "tp_rank": 0, "addr": {"hosts": [long]}}),
        ),
    ];
    for (call, body) in refused {
        let (status, text) = ask(&mut registry, call, &body);
        assert_eq!(status, 400, "{text}");
        let text = text.as_str().unwrap_or_default();
        assert!(text.ends_with("has at most 1024 bytes"), "{text}");
    }
    assert_eq!(registry.count(), 0, "nothing was registered");
}

#[test]
fn c8_a_request_has_one_uuid() {
    let native = "0190b6b0-7c5e-7d11-8f0a-5a3f6f1b2c3d";
    assert_eq!(request_uuid(native).to_string(), native);
    let other = request_uuid("cmpl-17");
    assert_eq!(other, request_uuid("cmpl-17"));
    assert_eq!(other.get_version_num(), 5);
    assert_ne!(other, request_uuid("cmpl-18"));
}
