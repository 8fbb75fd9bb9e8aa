//! Messages with tokens, secrets and keys can be logged.

use kvpool_proto::{
    HelloRequest, MasterMessage, NodeMessage, Register, RenewToken, Welcome, master_message,
    node_message,
};

const SECRET: &str = "marked-secret";

#[test]
fn a_logged_message_does_not_show_its_token() {
    let token = SECRET.to_owned();
    let hello = HelloRequest {
        token: token.clone(),
        ..Default::default()
    };
    let renewed = NodeMessage {
        body: Some(node_message::Body::RenewToken(RenewToken { token })),
    };
    let logged = format!("{hello:?} {renewed:?}");
    assert!(!logged.contains(SECRET), "{logged}");
    assert!(logged.contains("has_token: true"), "{logged}");
}

#[test]
fn a_logged_registration_and_its_welcome_show_no_secret_key_or_proof() {
    let register = Register {
        name: "node-7".to_owned(),
        life_secret: SECRET.into(),
        epoch_proof: SECRET.into(),
        ..Default::default()
    };
    let welcome = Welcome {
        epoch: 7,
        grant_key: SECRET.into(),
        epoch_proof: SECRET.into(),
        ..Default::default()
    };
    let from_node = NodeMessage {
        body: Some(node_message::Body::Register(register)),
    };
    let to_node = MasterMessage {
        body: Some(master_message::Body::Welcome(welcome)),
    };
    for (message, wanted) in [
        (
            format!("{from_node:?}"),
            ["node-7", "has_life_secret: true"],
        ),
        (format!("{to_node:?}"), ["epoch: 7", "has_grant_key: true"]),
    ] {
        assert!(!message.contains(SECRET), "{message}");
        for wanted in wanted {
            assert!(message.contains(wanted), "{message}");
        }
    }
}
