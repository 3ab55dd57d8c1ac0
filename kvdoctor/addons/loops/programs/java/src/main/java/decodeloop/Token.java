package decodeloop;

/** A new token of a sequence. */
public record Token(int sequence, int id) {}
