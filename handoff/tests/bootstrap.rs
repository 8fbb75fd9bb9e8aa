//! The bootstrap server over real connections.

use kvpool_handoff::bootstrap::BootstrapServer;
use kvpool_handoff::registry::RegistryOptions;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use tokio::net::TcpListener;

/// One request, as an HTTP client of an engine makes it.
fn ask(address: SocketAddr, call: &str, body: &str) -> (u16, String) {
    let mut socket = TcpStream::connect(address).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let length = body.len();
    let head = format!(
        "{call} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    socket.write_all(head.as_bytes()).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

fn sglang(tp: u32, page_size: u32) -> String {
    json!({
        "attn_tp_size": 2, "attn_tp_rank": tp, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0,
        "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "127.0.0.1",
        "rank_port": 7000 + tp, "page_size": page_size, "kv_cache_dtype": "auto",
    })
    .to_string()
}

async fn server() -> BootstrapServer {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    BootstrapServer::start(listener, RegistryOptions::default()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s2_ranks_register_and_are_found_over_http() {
    let server = server().await;
    let at = server.address();
    let all =
        "GET /route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    let one = "GET /route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0";
    let asking = tokio::task::spawn_blocking(move || {
        assert_eq!(ask(at, "GET /health", ""), (200, "OK".to_owned()));
        assert_eq!(ask(at, "PUT /route", &sglang(0, 64)).0, 200);
        assert_eq!(ask(at, all, "").0, 503);
        assert_eq!(ask(at, "PUT /route", &sglang(1, 32)).0, 400, "page size");
        assert_eq!(ask(at, "PUT /route", &sglang(1, 64)).0, 200);
        let (status, body) = ask(at, all, "");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &body["attn_tp_size"]), (200, &json!(2)));
        let (status, body) = ask(at, one, "");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &body["rank_port"]), (200, &json!(7001)));
        assert_eq!(ask(at, &one.replace("tp_rank=1", "tp_rank=9"), "").0, 404);
        let worker = json!({
            "engine_id": "e", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "127.0.0.1:5000",
        });
        assert_eq!(ask(at, "POST /register", &worker.to_string()).0, 200);
        let (_, body) = ask(at, "GET /query", "");
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body["0"]["worker_addr"]["0"]["0"], "127.0.0.1:5000");
        assert_eq!(ask(at, "PUT /route", "no json").0, 400);
        assert_eq!(ask(at, "PUT /route", &"x".repeat(70_000)).0, 413);
    });
    asking.await.unwrap();
    server.stop().await.unwrap();
    assert!(TcpStream::connect(at).is_err(), "the server has ended");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c7_ranks_that_register_at_once_all_count() {
    let server = server().await;
    let at = server.address();
    let ranks = (0..8u32).flat_map(|rank| [rank, rank]);
    let registering = ranks.map(|rank| {
        tokio::task::spawn_blocking(move || {
            let body = json!({
                "role": "Prefill", "tp_size": 8, "tp_rank": rank, "rank_ip": "127.0.0.1",
                "rank_port": 7000 + rank, "page_size": 16,
            });
            ask(at, "PUT /route", &body.to_string()).0
        })
    });
    for done in registering.collect::<Vec<_>>() {
        assert_eq!(done.await.unwrap(), 200);
    }
    let found = tokio::task::spawn_blocking(move || {
        (0..8)
            .map(|rank| {
                let call =
                    format!("GET /route?engine_rank={rank}&target_dp_group=0&target_pp_rank=0");
                let body: Value = serde_json::from_str(&ask(at, &call, "").1).unwrap();
                body["rank_port"].as_u64().unwrap()
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(found.await.unwrap(), (7000..7008).collect::<Vec<u64>>());
}
