//! Messages with tokens can be logged.

use kvpool_proto::{HelloRequest, NodeMessage, RenewToken, node_message};

#[test]
fn a_logged_message_does_not_show_its_token() {
    let token = "marked-secret".to_owned();
    let hello = HelloRequest {
        token: token.clone(),
        ..Default::default()
    };
    let renewed = NodeMessage {
        body: Some(node_message::Body::RenewToken(RenewToken { token })),
    };
    let logged = format!("{hello:?} {renewed:?}");
    assert!(!logged.contains("marked-secret"), "{logged}");
    assert!(logged.contains("has_token: true"), "{logged}");
}
